"""AxisMap: the matrix that resizes one axis, and the groups it is made from.

The paper's F and T (width) and R and G (layers) are all of this kind. A tensor that *writes* an axis is multiplied by
`write` (dst x src); one that *reads* it gets the dual, the row-normalised transpose, so that what is read is still
right. For two entries that merge, and for one that is split again:

            coalesce  write [1/2 1/2]   read [ 1  ]        decoalesce  write [1]   read [1/2 1/2]
                                             [ 1  ]                          [1]
The maps have one to a few entries a row, so they are kept and applied as such: one pass over the parameters.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

Group = tuple[int, ...]
Groups = tuple[Group, ...]
Scheme = Mapping[str, Groups]
"""Axis name -> which entries of the larger level become one entry of the smaller."""

NewLayers = Literal["copy", "halve", "identity"]
"""How a layer that is split shares its output among its copies:

copy      each copy adds the whole output (the paper)                     weights 1, 1
halve     each adds its part: the sum is as before                        weights 1/2, 1/2
identity  the first adds all, the others nothing: exactly the small net   weights 1, 0
"""


@dataclass(frozen=True, eq=False)
class AxisMap:
    """A sparse matrix on one axis: row i of the result takes `index[i]` of the source, weighted.

    index: [dst, k] entries of the source; write, read: [dst, k] float64 weights for writers and for readers.
    """

    src: int
    index: Tensor
    write: Tensor
    read: Tensor

    @property
    def dst(self) -> int:
        return len(self.index)

    def apply(self, x: Tensor, dim: int, reads: bool) -> Tensor:
        """Resize dimension `dim` of `x`, whose length must be `src`, in x's own dtype. May be a view of `x`."""
        if x.shape[dim] != self.src:
            raise ValueError(
                f"the map resizes {self.src} entries, dimension {dim} of {tuple(x.shape)} has {x.shape[dim]}"
            )
        total: Tensor | None = None
        for j, weights in enumerate((self.read if reads else self.write).unbind(1)):
            term, weight = _take(x, dim, self.index[:, j]), float(weights[0])
            if not bool((weights == weight).all()):
                term = term * weights.to(x.device, x.dtype).view([-1 if d == dim else 1 for d in range(x.ndim)])
                weight = 1.0
            total = (term if weight == 1 else term * weight) if total is None else torch.add(total, term, alpha=weight)
        assert total is not None
        return total

    def dense(self, reads: bool) -> Tensor:
        """The matrix itself, float64: [dst, src] for writers, its dual [src, dst] for readers."""
        full = torch.zeros(self.dst, self.src, dtype=torch.float64)
        full.scatter_add_(1, self.index, self.read if reads else self.write)
        return full.T if reads else full


def _take(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """x.index_select(dim, index), with slices where the index is regular: 4 times faster on a last dimension."""
    n, length = len(index), x.shape[dim]
    before: tuple[slice, ...] = (slice(None),) * dim
    start, step = int(index[0]), int(index[1] - index[0]) if n > 1 else 1
    if step > 0 and torch.equal(index, torch.arange(n) * step + start):
        return x[(*before, slice(start, start + n * step, step))]
    times = n // length
    if n % length == 0 and torch.equal(index, torch.arange(length).repeat_interleave(times)):
        out = x.new_empty([*x.shape[:dim], n, *x.shape[dim + 1 :]])
        for i in range(times):
            out[(*before, slice(i, None, times))] = x
        return out
    return x.index_select(dim, index.to(x.device))


def merge(groups: Groups) -> AxisMap:
    """Coalesce: each group becomes one entry. Writers are averaged, readers summed."""
    partition(groups, sum(map(len, groups)), "merge")
    k = max(len(group) for group in groups)
    index = torch.tensor([[*group, *[group[0]] * (k - len(group))] for group in groups])
    live = torch.tensor([[j < len(group) for j in range(k)] for group in groups], dtype=torch.float64)
    return AxisMap(sum(map(len, groups)), index, write=live / live.sum(1, keepdim=True), read=live)


def split(groups: Groups, noise: float = 0.0, seed: int = 0) -> AxisMap:
    """Decoalesce: each entry becomes its group. Writers are copied, readers share: evenly, or unevenly by `noise`.

    Each share is (1 + noise * e) / group size, the e of a group drawn uniformly from [-1, 1] and centred, so that
    shares add up to 1 (lossless). Equal copies would get equal gradients for ever; uneven shares tell them apart.
    """
    partition(groups, sum(map(len, groups)), "split")
    draw = random.Random(seed)
    index, read = [0] * sum(map(len, groups)), [0.0] * sum(map(len, groups))
    for entry, group in enumerate(groups):
        raw = [draw.uniform(-1, 1) for _ in group]
        for member, e in zip(group, raw, strict=True):
            index[member], read[member] = entry, (1 + noise * (e - sum(raw) / len(raw))) / len(group)
    column = torch.tensor(read, dtype=torch.float64)[:, None]
    return AxisMap(len(groups), torch.tensor(index)[:, None], write=torch.ones_like(column), read=column)


def merge_layers(groups: Groups, new_layers: NewLayers) -> AxisMap:
    """Coalesce layers. What adds to the residual stream is averaged too ("copy"), else summed, like any reader."""
    both = merge(groups)
    return AxisMap(both.src, both.index, both.write, both.write if new_layers == "copy" else both.read)


def split_layers(groups: Groups, new_layers: NewLayers) -> AxisMap:
    """Decoalesce layers, the inverse of `merge_layers` with the same `new_layers`."""
    even = split(groups)
    if new_layers == "halve":
        return even
    first = torch.zeros_like(even.read)
    first[[group[0] for group in groups]] = 1
    return AxisMap(even.src, even.index, even.write, even.write if new_layers == "copy" else first)


def adjacent(n: int, m: int) -> Groups:
    """n entries as m groups of neighbours: (0, 1), (2, 3), ... As even as can be where m does not divide n."""
    bounds = [round(i * n / m) for i in range(m + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(bounds))


def stacked(n: int, m: int) -> Groups:
    """n entries as m groups with stride m: (0, m, ...), (1, m + 1, ...); splitting then stacks copies of the whole."""
    return tuple(tuple(range(i, n, m)) for i in range(m))


def partition(groups: Sequence[Sequence[int]], n: int, what: str) -> Groups:
    """Check that `groups` hold each of 0..n-1 once; `what` names the axis in the error."""
    found = sorted(i for group in groups for i in group)
    if found != list(range(n)) or not all(groups):
        raise ValueError(f"{what}: the groups {[list(g) for g in groups]} must hold each of 0 to {n - 1} exactly once")
    return tuple(tuple(group) for group in groups)
