"""The operators of the V-cycle: coalesce, decoalesce, interpolate. Pure functions on state dicts.

`resize` is the engine: one AxisMap for each axis that changes, applied to whatever tensor has that axis. For a linear
layer "mlp <- embed", with M the map of an axis and M' its dual,

    coalesce     W_small = M_mlp  W  M'_embed        [ a b ]      ->  [ (a + b + c + d) / 2 ]
                                                     [ c d ]
    decoalesce   W_large = M_mlp  W  M'_embed        [ w ]        ->  [ w/2 w/2 ]
                                                                      [ w/2 w/2 ]
Arithmetic is in float32 (float64 stays float64) whatever the dtype; integer and bool buffers are kept as they are.
Ties stay: names that share a tensor share one in the result too.
Source: Zou, Zhang, Deng, ICLR 2024, section 3.2 (coalescing, equations 4 to 7; de-coalescing; interpolation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from mlframe.axes import LAYERS, Architecture, Axes, Match, Sizes, State
from mlframe.maps import AxisMap, NewLayers, Scheme, merge, merge_layers, split, split_layers

Maps = Mapping[str, AxisMap]
"""Axis name -> the matrix that resizes it."""


@torch.no_grad()
def resize(state: State, architecture: Architecture, sizes: Sizes, maps: Maps) -> dict[str, Tensor]:
    """Apply `maps` to every tensor of `state`, whose axes have the lengths `sizes`.

    Raises ValueError where a name is not in the architecture's table, a layer is missing or a length does not fit.
    """
    tied = ties(state)
    taken = {x.untyped_storage().data_ptr() for x in state.values()}
    out: dict[str, Tensor] = {}
    for name, x in resized(state, architecture, sizes, maps, tied):
        fresh = x.clone() if x.untyped_storage().data_ptr() in taken else x
        taken.add(fresh.untyped_storage().data_ptr())
        out[name] = fresh
    return {name: out[tied.get(name, name)] for name in [*out, *tied]}


@torch.no_grad()
def resized(
    state: State, architecture: Architecture, sizes: Sizes, maps: Maps, tied: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """`resize`, one tensor after the other, without those that are `tied` to another; may share memory with `state`.

    `state` is read one tensor at a time (those of merging layers together), so it may fetch each as it is asked for.
    """
    if unknown := sorted(maps.keys() - architecture.axes):
        raise ValueError(f"{architecture.name}: no tensor has an axis {unknown}; there are {sorted(architecture.axes)}")
    layers = maps.get(LAYERS)
    blocks: dict[str, dict[int, str]] = defaultdict(dict)
    matches = architecture.match(state)
    for name, first in tied.items():
        if matches[name].axes.dims != matches[first].axes.dims:
            one, other = matches[name].axes.text, matches[first].axes.text
            raise ValueError(f"{architecture.name}: {name} ({one}) and {first} ({other}) are one tensor")
    for name, match in matches.items():
        if name in tied:
            continue
        if match.layer is None or layers is None:
            x = state[name]
            yield name, _resized(name, x, match.axes, sizes, maps).to(x.dtype).contiguous()
        else:
            blocks[match.pattern][match.layer] = name
    if layers is not None:
        for pattern, names in blocks.items():
            if sorted(names) != list(range(layers.src)):
                raise ValueError(f"{pattern}: layers {sorted(names)} instead of 0 to {layers.src - 1}")
            ordered = [names[i] for i in range(layers.src)]
            yield from _resized_layers(state, ordered, matches[names[0]], sizes, maps, layers)


def ties(state: State) -> dict[str, str]:
    """Names whose tensor is that of an earlier name, such as a head that is the embedding: name -> earlier name."""
    seen: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, x in state.items():
        if x.numel() and not x.is_meta:
            place = (x.device, x.data_ptr(), x.shape, x.stride())
            if (first := seen.setdefault(place, name)) != name:
                tied[name] = first
    return tied


def _resized(name: str, x: Tensor, axes: Axes, sizes: Sizes, maps: Maps) -> Tensor:
    """`x` with every axis that has a map resized, in float32 at least; may share memory with `x`."""
    if not x.is_floating_point():
        return x
    y = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(axes.unfused(x.shape, sizes))
    todo = [(dim, maps[a.name], a.reads) for dim, a in enumerate(axes.factors) if a.name in maps]
    # Rows are cheap to add and to copy, columns are not: shrink rows first, grow them last.
    todo.sort(key=lambda step: step[0] if step[1].dst <= step[1].src else y.ndim - step[0])
    for dim, axis_map, reads in todo:
        try:
            y = axis_map.apply(y, dim, reads)
        except ValueError as error:
            raise ValueError(f"{name} ({axes.text}): {error}") from error
    return y.reshape(_fused(y.shape, axes))


def _fused(shape: torch.Size, axes: Axes) -> list[int]:
    lengths, start = [], 0
    for dim in axes.dims:
        lengths.append(shape[start : start + len(dim)].numel())
        start += len(dim)
    return lengths


def _resized_layers(
    state: State, names: list[str], match: Match, sizes: Sizes, maps: Maps, layers: AxisMap
) -> Iterator[tuple[str, Tensor]]:
    """One tensor of all layers. Shrinking mixes layers first, growing last, so that each weight is touched once."""
    shrinks = layers.dst <= layers.src
    weights = layers.read if match.axes.residual else layers.write
    sources: dict[int, Tensor] = {}  # what a layer is made of, which is often what the one before was
    dtype = None
    for i, (row, shares) in enumerate(zip(layers.index.tolist(), weights.tolist(), strict=True)):
        used = {j: share for j, share in zip(row, shares, strict=True) if share} or {row[0]: 0.0}
        sources = {j: x for j, x in sources.items() if j in used}
        for j in [j for j in used if j not in sources]:
            sources[j] = state[names[j]]
            dtype = sources[j].dtype
            if not shrinks:
                sources[j] = _resized(names[j], sources[j], match.axes, sizes, maps)
        name, mixed = match.name(i), _mixed([sources[j] for j in used], list(used.values()))
        if shrinks:
            mixed = _resized(name, mixed, match.axes, sizes, maps)
        yield name, mixed.to(dtype).contiguous()


def _mixed(tensors: list[Tensor], weights: list[float]) -> Tensor:
    """The weighted sum, in float32 at least; the first tensor itself where nothing is to be computed."""
    first = tensors[0]
    if not first.is_floating_point() or (weights[0] == 1 and not any(weights[1:])):
        return first
    total = first.to(torch.promote_types(first.dtype, torch.float32)) * weights[0]
    for x, weight in zip(tensors[1:], weights[1:], strict=True):
        if weight:
            total.add_(x, alpha=weight)
    return total


def coalesce(
    state: State, architecture: Architecture, sizes: Sizes, scheme: Scheme, new_layers: NewLayers = "copy"
) -> dict[str, Tensor]:
    """The smaller network: the entries of each group of `scheme` become one. `sizes` are those of `state`.

    Writers are averaged and readers summed; layers are averaged, and unless `new_layers` is "copy" (the paper) what
    they add to the residual stream is summed.
    """
    return resize(state, architecture, sizes, merging(scheme, new_layers))


def merging(scheme: Scheme, new_layers: NewLayers = "copy") -> dict[str, AxisMap]:
    """The maps of `coalesce`."""
    return {axis: merge_layers(g, new_layers) if axis == LAYERS else merge(g) for axis, g in scheme.items()}


def decoalesce(
    state: State,
    architecture: Architecture,
    sizes: Sizes,
    scheme: Scheme,
    new_layers: NewLayers = "copy",
    split_noise: float = 0.0,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The larger network: each entry becomes its group of `scheme`. `sizes` are those of `state` (the smaller one).

    The inverse on the right: coalesce(decoalesce(x)) == x with the same scheme and `new_layers`. In width the network
    computes the same function, for any `split_noise`; in depth it does when `new_layers` is "identity".
    """
    return resize(state, architecture, sizes, splitting(scheme, new_layers, split_noise, seed))


def splitting(
    scheme: Scheme, new_layers: NewLayers = "copy", split_noise: float = 0.0, seed: int = 0
) -> dict[str, AxisMap]:
    """The maps of `decoalesce`."""
    return {
        axis: split_layers(groups, new_layers) if axis == LAYERS else split(groups, split_noise, seed + i)
        for i, (axis, groups) in enumerate(sorted(scheme.items()))
    }


@torch.no_grad()
def interpolate(large: State, grown: State, alpha: float) -> dict[str, Tensor]:
    """(1 - alpha) * large + alpha * grown, in float32 at least; what is not floating point comes from `large`.

    alpha 0 is exactly `large` and 1 exactly `grown`. Raises ValueError where names or shapes differ.
    Ties of `large` stay.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: between 0 (large) and 1 (grown)")
    _same(large, grown)
    out: dict[str, Tensor] = {}
    tied = ties(large)
    for name, a in large.items():
        b = grown[name]
        if name in tied:
            out[name] = out[tied[name]]
        elif not a.is_floating_point() or alpha == 0:
            out[name] = a.clone()
        elif alpha == 1:
            out[name] = b.to(a.dtype, copy=True)
        else:
            wide = torch.promote_types(a.dtype, torch.float32)
            out[name] = torch.lerp(a.to(wide), b.to(wide), alpha).to(a.dtype)
    return out


def _same(large: State, grown: State) -> None:
    missing, extra = sorted(large.keys() - grown.keys()), sorted(grown.keys() - large.keys())
    shapes = [
        f"{name} {tuple(large[name].shape)} and {tuple(grown[name].shape)}"
        for name in large
        if name in grown and large[name].shape != grown[name].shape
    ]
    if missing or extra or shapes:
        raise ValueError(f"cannot interpolate: missing {missing}, extra {extra}, shapes {shapes}")
