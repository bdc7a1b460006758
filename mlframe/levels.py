"""Levels: the sizes of network in a cycle, each built from the one above it. Level 0 is the full model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mlframe.axes import LAYERS, Architecture, Sizes, check, query_heads
from mlframe.errors import ConfigError, check_whole
from mlframe.maps import Groups, Scheme, adjacent, partition, stacked

Shrink = int | str | Sequence[Sequence[int]]
"""How an axis shrinks: a factor (2: neighbours merge), "stacked" (i merges with i + half), or the groups as lists."""


@dataclass(frozen=True)
class Level:
    """One size of network.

    config: what `architecture.build` takes.  sizes: the length of every axis.  parameters: their number.
    flops: forward + backward FLOPs of one sample.  scheme: the groups of the level *above* that became this level's
    entries; empty at level 0.
    """

    index: int
    architecture: Architecture
    config: Mapping[str, Any]
    sizes: Sizes
    parameters: int
    flops: int
    scheme: Scheme

    def build(self) -> nn.Module:
        return self.architecture.build(self.config)

    @property
    def shape(self) -> dict[str, int]:
        """What a table of levels shows."""
        return {"layers": self.sizes["layers"], "heads": query_heads(self.sizes), "width": self.sizes["embed"]}


def make_levels(
    architecture: Architecture,
    config: Mapping[str, Any],
    count: int = 2,
    heads: Shrink = 2,
    mlp: Shrink = 2,
    layers: Shrink = 2,
    sample: Mapping[str, int] | None = None,
) -> tuple[Level, ...]:
    """The full model and `count - 1` smaller ones, each with fewer heads, MLP neurons and layers than the last.

    The width of the residual stream follows the heads, whose own width (head_dim) never changes. 1 keeps an axis.
    Of grouped queries the key and value heads merge, each with its group; where they do not divide, the queries of
    each group do. Groups given as lists are those of level 0, so they need `count` 2.
    sample: what the data decides of a sample's size: of text `tokens`, and `predictions`, those that are predicted.
    Every level is built on the meta device and checked against the architecture's table. Raises ConfigError where an
    axis does not divide.
    """
    if not isinstance(architecture, Architecture):
        raise ConfigError(f"model.architecture is a {type(architecture).__name__}: name an Architecture, such as "
                          "mlframe.architectures.VIT")  # fmt: skip
    check_whole("levels.count", count, 1)
    levels = [_level(0, architecture, config, {}, sample or {})]
    for index in range(1, count):
        above = levels[-1]
        scheme = {}
        heads_axis = _heads_axis(above, heads)
        for key, axis, shrink in (("heads", heads_axis, heads), ("mlp", "mlp", mlp), (LAYERS, LAYERS, layers)):
            if isinstance(shrink, Sequence) and not isinstance(shrink, str) and count > 2:
                raise ConfigError(
                    f"levels.{key}: groups are those of level 0, so they need levels.count=2, not {count}"
                )
            scheme[axis] = _groups(f"levels.{key}", axis, above, shrink)
        scheme["embed"] = _embed_groups(above, heads_axis, len(scheme[heads_axis]))
        scheme = {axis: groups for axis, groups in scheme.items() if len(groups) < above.sizes[axis]}
        if not scheme:
            raise ConfigError(
                f"levels: level {index} would be as large as level {index - 1}; shrink heads, mlp or layers"
            )
        sizes = {**above.sizes, **{axis: len(groups) for axis, groups in scheme.items()}}
        smaller = {**config, **architecture.resized(sizes)}
        levels.append(_level(index, architecture, smaller, scheme, sample or {}, sizes))
    return tuple(levels)


def _heads_axis(above: Level, shrink: Shrink) -> str:
    """The axis by which heads become fewer."""
    if "kv_heads" not in above.sizes:
        return "heads"
    factor = 2 if shrink == "stacked" else shrink
    by_group = isinstance(factor, int) and factor > 0 and above.sizes["kv_heads"] % factor
    return "group" if by_group and above.sizes["group"] % factor == 0 else "kv_heads"  # type: ignore[operator]


def _groups(key: str, axis: str, above: Level, shrink: Shrink) -> Groups:
    n = above.sizes[axis]
    if isinstance(shrink, Sequence) and not isinstance(shrink, str):
        if not all(isinstance(group, Sequence) and all(type(i) is int for i in group) for group in shrink):
            raise ConfigError(f"{key}={shrink}: groups are lists of whole numbers, such as [[0,1],[2,3]]")
        try:
            return partition(shrink, n, key if key.endswith(f".{axis}") else f"{key} ({axis})")
        except ValueError as error:
            raise ConfigError(str(error)) from error
    factor = 2 if shrink == "stacked" else shrink
    if type(factor) is not int:
        raise ConfigError(f"{key}={shrink}: a whole number, 'stacked' or a list of groups")
    if factor < 1 or n % factor:
        raise ConfigError(
            f"{key}={shrink}: the {n} {axis} of level {above.index} do not divide by {factor}; "
            f"use a factor of {n}, give the groups as lists, keep them with 1, or have fewer levels (levels.count)"
        )
    return stacked(n, n // factor) if shrink == "stacked" else adjacent(n, n // factor)


def _embed_groups(above: Level, axis: str, heads: int) -> Groups:
    """Groups of the residual stream, all of one size: LayerNorm averages over the stream, so others would change it."""
    embed, width, before = above.sizes["embed"], above.sizes["embed"] * heads, above.sizes[axis]
    if width % before or embed % (width // before):
        raise ConfigError(
            f"levels.heads: {before} {axis} to {heads} leaves no whole number of equal groups in a "
            f"width of {embed}; merge to a number of {axis} that divides {before}"
        )
    return adjacent(embed, width // before)


def _level(
    index: int,
    architecture: Architecture,
    config: Mapping[str, Any],
    scheme: Scheme,
    sample: Mapping[str, int],
    expected: Sizes | None = None,
) -> Level:
    try:
        with torch.device("meta"):
            network = architecture.build(config)
        sizes = {**architecture.sizes(network), **sample}
    except ConfigError:
        raise
    except Exception as error:  # whatever the model library raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"model.config does not build at level {index}: {reason}") from error
    if sizes.get("tokens", 0) > sizes.get("pos", sizes.get("tokens", 0)):
        raise ConfigError(
            f"data.sequence_length={sizes['tokens']}: the network has {sizes['pos']} positions; "
            "shorten it, or give model.config more"
        )
    if expected is not None and sizes != expected:
        raise ConfigError(f"level {index}: asked for {dict(expected)}, the model library built {sizes}")
    check(network.state_dict(), architecture, sizes)
    parameters = sum(p.numel() for p in network.parameters())
    try:
        flops = architecture.flops(sizes)
    except KeyError as error:
        raise ConfigError(
            f"{architecture.name}: how many {error.args[0]} has a sample? It is the data that says "
            "(make_levels(sample={'tokens': 128, 'predictions': 128}))"
        ) from error
    return Level(index, architecture, dict(config), sizes, parameters, flops, scheme)
