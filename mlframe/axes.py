"""Axis strings: what each dimension of a weight tensor is called, and whether the tensor writes or reads it.

An axis string names the dimensions in stored order, einops-like:

    "mlp <- embed"                      nn.Linear: stored (out, in); writes mlp, reads embed
    "embed -> mlp"                      GPT-2's Conv1D: stored (in, out); the same roles
    "embed"                             bias, norm or token: writes embed
    "<- embed"                          a vector that only reads embed
    "(3 heads head_dim) <- embed"       one dimension that fuses several axes, the last one fastest
    "embed <- embed"                    writes an axis and reads it
    "embed <- _ _ _"                    "_" is a dimension without a name
    "+ embed <- mlp"                    "+": the output is added to the residual stream

A resize gives a matrix to some axis *names*; axes of other names keep their size. Names are keys, sizes never are.
A tensor with "+" takes part in a sum over layers (x + f1(x) + f2(x) + ...), so it *reads* the axis `layers`; every
other tensor of a layer writes it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

LAYERS = "layers"
Sizes = Mapping[str, int]
State = Mapping[str, Tensor]

_ITEM = re.compile(r"\(([^()]*)\)|([a-z_]\w*|\d+)")
_ANONYMOUS = "_"


@dataclass(frozen=True)
class Axis:
    """One named factor of one dimension. `name` is "_" without a name and a number where the size is constant."""

    name: str
    reads: bool


@dataclass(frozen=True)
class Axes:
    """A parsed axis string: one tuple of factors for each stored dimension."""

    text: str
    dims: tuple[tuple[Axis, ...], ...]
    residual: bool

    @property
    def factors(self) -> list[Axis]:
        """All factors in stored order: the dimensions of the tensor once its fused dimensions are split."""
        return [axis for dim in self.dims for axis in dim]

    def unfused(self, shape: Iterable[int], sizes: Sizes) -> list[int]:
        """The shape with every fused dimension split into its factors, whose lengths `sizes` must hold."""
        lengths: list[int] = []
        for length, dim in zip(shape, self.dims, strict=True):
            lengths += [length] if len(dim) == 1 else [_factor(axis, sizes) for axis in dim]
        return lengths


@cache
def parse(text: str) -> Axes:
    """Parse an axis string. Raises ValueError that quotes the text where it does not follow the grammar."""
    body = text.strip()
    residual = body.startswith("+")
    body = body.removeprefix("+").strip()
    arrows = [arrow for arrow in ("<-", "->") if arrow in body]
    if len(arrows) > 1 or any(body.count(arrow) > 1 for arrow in arrows):
        raise ValueError(f"axis string {text!r}: at most one arrow")
    if not arrows:
        sides = [(body, False)]
    else:
        first, second = body.split(arrows[0])
        sides = [(first, arrows[0] == "->"), (second, arrows[0] == "<-")]
    dims = tuple(dim for side, reads in sides for dim in _parse_side(text, side, reads))
    named = [axis for dim in dims for axis in dim if axis.name != _ANONYMOUS and not axis.name.isdigit()]
    if len(set(named)) < len(named):
        raise ValueError(f"axis string {text!r}: a name stands twice on one side")
    if not dims:
        raise ValueError(f"axis string {text!r}: no axis")
    return Axes(text, dims, residual)


def _parse_side(text: str, side: str, reads: bool) -> list[tuple[Axis, ...]]:
    if _ITEM.sub("", side).strip():
        raise ValueError(f"axis string {text!r}: cannot read {_ITEM.sub('', side).strip()!r}")
    dims = []
    for fused, name in _ITEM.findall(side):
        factors = fused.split() if fused else [name]
        dims.append(tuple(Axis(factor, reads) for factor in factors))
    return dims


def expand(pattern: str) -> list[str]:
    """Shell braces: "norm{1,2}.{weight,bias}" is four names; "{layers}" stays, as it holds no comma."""
    parts = re.split(r"(\{[^{}]*,[^{}]*\})", pattern)
    choices = [part[1:-1].split(",") if part.startswith("{") and "," in part else [part] for part in parts]
    return ["".join(choice) for choice in itertools.product(*choices)]


@dataclass(frozen=True)
class Match:
    """Where a tensor name stands in an architecture's table."""

    pattern: str
    axes: Axes
    layer: int | None

    def name(self, layer: int) -> str:
        return self.pattern.replace("{layers}", str(layer))


@dataclass(frozen=True)
class Architecture:
    """Everything the engine knows about one family of networks.

    tensors: name pattern -> axis string. Braces with commas are alternatives, "{layers}" is the layer's number.
    build: config -> network, freshly initialised (also on the meta device).
    sizes: network -> the length of every named axis, and whatever else `flops` needs.
    resized: sizes -> the config fields that give a network of these sizes.
    flops: sizes -> forward + backward matmul FLOPs of one sample (design.md, "FLOPs"). What the data decides of a
    sample's size (`tokens`, `predictions`) is among the sizes too.
    save: (network, config, folder, about) -> None; writes the form that the family's own library loads.
    load: (network, source) -> None; the weights of a folder that `save` wrote, or of a checkpoint of the library, into
    the network. Raises ValueError where any weight is missing, left over or of another shape.
    """

    name: str
    tensors: Mapping[str, str]
    build: Callable[[Mapping[str, Any]], torch.nn.Module]
    sizes: Callable[[torch.nn.Module], dict[str, int]]
    resized: Callable[[Sizes], dict[str, Any]]
    flops: Callable[[Sizes], int]
    save: Callable[..., None]
    load: Callable[[torch.nn.Module, str], None]

    @property
    def axes(self) -> set[str]:
        """The names of all axes that the table's tensors have."""
        named = {axis.name for text in self.tensors.values() for axis in parse(text).factors}
        return {LAYERS} | {name for name in named if name != _ANONYMOUS and not name.isdigit()}

    def match(self, names: Iterable[str]) -> dict[str, Match]:
        """Each name's place in the table; every name must match exactly one pattern."""
        rules = _rules(tuple(self.tensors.items()))
        found: dict[str, Match] = {}
        unknown: list[str] = []
        for name in names:
            hits = [(pattern, axes, hit) for pattern, axes, regex in rules if (hit := regex.fullmatch(name))]
            if len(hits) > 1:
                raise ValueError(f"{self.name}: tensor {name!r} matches {[pattern for pattern, _, _ in hits]}, not one")
            if not hits:
                unknown.append(name)
                continue
            pattern, axes, hit = hits[0]
            found[name] = Match(pattern, axes, int(hit[1]) if hit.re.groups else None)
        if unknown:
            raise ValueError(f"{self.name}: no axis string for {_some(unknown)}; add them to the architecture's table")
        return found


@cache
def _rules(items: tuple[tuple[str, str], ...]) -> list[tuple[str, Axes, re.Pattern[str]]]:
    rules = []
    for braces, text in items:
        for pattern in expand(braces):
            regex = re.escape(pattern).replace(re.escape("{layers}"), r"(\d+)")
            rules.append((pattern, parse(text), re.compile(regex)))
    return rules


def query_heads(sizes: Sizes) -> int:
    """The number of attention heads: of grouped queries, all that share the key and value heads."""
    return sizes["heads"] if "heads" in sizes else sizes["kv_heads"] * sizes["group"]


def check(state: State, architecture: Architecture, sizes: Sizes) -> None:
    """Compare every tensor's shape with what its axis string and `sizes` say. Raises ValueError with all differences.

    Axes that `sizes` does not name (and that are not fused) take the length of the first tensor that has them.
    """
    seen = dict(sizes)
    wrong: list[str] = []
    layers: set[int] = set()
    for name, match in architecture.match(state).items():
        shape, axes = tuple(state[name].shape), match.axes
        if match.layer is not None:
            layers.add(match.layer)
        if len(shape) != len(axes.dims):
            wrong.append(f"{name}: shape {shape} has {len(shape)} dimensions, {axes.text!r} names {len(axes.dims)}")
            continue
        expected = tuple(_length(dim, length, seen) for dim, length in zip(axes.dims, shape, strict=True))
        if shape != expected:
            wrong.append(f"{name}: shape {shape}, but {axes.text!r} gives {expected}")
    if LAYERS in sizes and layers != set(range(sizes[LAYERS])):
        wrong.append(f"layers {sorted(layers)} instead of 0 to {sizes[LAYERS] - 1}")
    if wrong:
        raise ValueError(f"{architecture.name}: {_some(wrong, '; ')}")


def check_nan(where: object, state: State) -> None:
    """Raise ValueError where a tensor holds NaN: whatever is trained from it is NaN too."""
    found = {name: int(x.isnan().sum()) for name, x in state.items() if x.is_floating_point()}
    if bad := [name for name, count in found.items() if count]:
        raise ValueError(f"{where} holds {sum(found.values()):,} NaN values, in {_some(bad)}")


def _length(dim: tuple[Axis, ...], length: int, seen: dict[str, int]) -> int:
    if len(dim) == 1 and not dim[0].name.isdigit():
        return length if dim[0].name == _ANONYMOUS else seen.setdefault(dim[0].name, length)
    return math.prod(_factor(axis, seen) for axis in dim)


def _factor(axis: Axis, sizes: Sizes) -> int:
    if axis.name.isdigit():
        return int(axis.name)
    if axis.name not in sizes:
        raise ValueError(
            f"axis {axis.name!r} is fused with others, so its length must be given; known: {sorted(sizes)}"
        )
    return sizes[axis.name]


def _some(items: list[str], joint: str = ", ", most: int = 8) -> str:
    more = f"{joint}and {len(items) - most} more" if len(items) > most else ""
    return joint.join(items[:most]) + more
