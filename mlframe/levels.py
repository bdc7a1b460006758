"""Levels: the sizes of network in a cycle, each built from the one above it. Level 0 is the full model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mlframe.axes import LAYERS, Architecture, Sizes, check
from mlframe.errors import ConfigError
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


def make_levels(
    architecture: Architecture,
    config: Mapping[str, Any],
    count: int = 2,
    heads: Shrink = 2,
    mlp: Shrink = 2,
    layers: Shrink = 2,
) -> tuple[Level, ...]:
    """The full model and `count - 1` smaller ones, each with fewer heads, MLP neurons and layers than the last.

    The width of the residual stream follows the heads, whose own width (head_dim) never changes. 1 keeps an axis.
    Groups given as lists are those of level 0, so they need `count` 2. Every level is built on the meta device and
    checked against the architecture's table. Raises ConfigError where an axis does not divide.
    """
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"levels.count={count}: a whole number, 1 or more")
    levels = [_level(0, architecture, config, {})]
    asked: dict[str, Shrink] = {"heads": heads, "mlp": mlp, LAYERS: layers}
    for index in range(1, count):
        above = levels[-1]
        scheme = {}
        for axis, shrink in asked.items():
            if isinstance(shrink, Sequence) and not isinstance(shrink, str) and count > 2:
                raise ConfigError(
                    f"levels.{axis}: groups are those of level 0, so they need levels.count=2, not {count}"
                )
            scheme[axis] = _groups(axis, above, shrink)
        scheme["embed"] = _embed_groups(above, len(scheme["heads"]))
        scheme = {axis: groups for axis, groups in scheme.items() if len(groups) < above.sizes[axis]}
        if not scheme:
            raise ConfigError(
                f"levels: level {index} would be as large as level {index - 1}; shrink heads, mlp or layers"
            )
        sizes = {**above.sizes, **{axis: len(groups) for axis, groups in scheme.items()}}
        levels.append(_level(index, architecture, {**config, **architecture.resized(sizes)}, scheme, sizes))
    return tuple(levels)


def _groups(axis: str, above: Level, shrink: Shrink) -> Groups:
    n = above.sizes[axis]
    if isinstance(shrink, str) and shrink != "stacked":
        raise ConfigError(f"levels.{axis}={shrink}: a number, 'stacked' or a list of groups")
    if isinstance(shrink, Sequence) and not isinstance(shrink, str):
        try:
            return partition(shrink, n, f"levels.{axis}")
        except ValueError as error:
            raise ConfigError(str(error)) from error
    factor = 2 if isinstance(shrink, str) else shrink
    if type(factor) is not int:
        raise ConfigError(f"levels.{axis}={shrink}: a whole number, 'stacked' or a list of groups")
    if factor < 1 or n % factor:
        raise ConfigError(
            f"levels.{axis}={shrink}: the {n} {axis} of level {above.index} do not divide by {factor}; "
            f"use a factor of {n}, give the groups as lists, keep them with 1, or have fewer levels (levels.count)"
        )
    return stacked(n, n // factor) if isinstance(shrink, str) else adjacent(n, n // factor)


def _embed_groups(above: Level, heads: int) -> Groups:
    """Groups of the residual stream, all of one size: LayerNorm averages over the stream, so others would change it."""
    embed, width = above.sizes["embed"], above.sizes["embed"] * heads
    if width % above.sizes["heads"] or embed % (width // above.sizes["heads"]):
        raise ConfigError(
            f"levels.heads: {above.sizes['heads']} heads to {heads} leaves no whole number of equal groups in a "
            f"width of {embed}; merge to a number of heads that divides {above.sizes['heads']}"
        )
    return adjacent(embed, width // above.sizes["heads"])


def _level(
    index: int, architecture: Architecture, config: Mapping[str, Any], scheme: Scheme, expected: Sizes | None = None
) -> Level:
    try:
        with torch.device("meta"):
            network = architecture.build(config)
    except Exception as error:  # whatever the model library raises
        raise ConfigError(f"model.config does not build at level {index}: {error}") from error
    sizes = architecture.sizes(network)
    if expected is not None and sizes != expected:
        raise ConfigError(f"level {index}: asked for {dict(expected)}, the model library built {sizes}")
    check(network.state_dict(), architecture, sizes)
    parameters = sum(p.numel() for p in network.parameters())
    return Level(index, architecture, dict(config), sizes, parameters, architecture.flops(sizes), scheme)
