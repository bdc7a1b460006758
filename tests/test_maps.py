"""Matrices of one axis: duals, groups, shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mlframe.maps import (
    AxisMap,
    Groups,
    adjacent,
    merge,
    merge_layers,
    partition,
    split,
    split_layers,
    stacked,
)  # fmt: skip


@st.composite
def partitions(draw: st.DrawFn) -> Groups:
    """Any partition of 0..n-1, in any order, with groups of any size."""
    n = draw(st.integers(1, 9))
    order = draw(st.permutations(range(n)))
    cuts = sorted(draw(st.sets(st.integers(1, n - 1)))) if n > 1 else []
    return tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, n], strict=True))


def dual(m: torch.Tensor) -> torch.Tensor:
    """The row-normalised transpose, written densely: the definition in design.md."""
    return m.T / m.T.sum(1, keepdim=True)


@given(partitions())
def test_readers_get_the_dual_of_writers(groups: Groups) -> None:
    for axis_map in (merge(groups), split(groups)):
        torch.testing.assert_close(axis_map.dense(reads=True), dual(axis_map.dense(reads=False)))


@given(partitions(), st.floats(0, 1))
def test_merging_what_was_split_gives_it_back(groups: Groups, noise: float) -> None:
    down, up = merge(groups), split(groups, noise)
    one = torch.eye(len(groups), dtype=torch.float64)
    torch.testing.assert_close(down.dense(False) @ up.dense(False), one)
    torch.testing.assert_close(up.dense(True) @ down.dense(True), one)
    # What is written to copies and read from them again is what was written: the network's function stays.
    torch.testing.assert_close(up.dense(True) @ up.dense(False), one)


@given(partitions(), st.data())
def test_applying_is_the_dense_product(groups: Groups, data: st.DataObject) -> None:
    axis_map: AxisMap = data.draw(st.sampled_from([merge(groups), split(groups, 0.3)]))
    x = torch.randn(2, axis_map.src, 3, dtype=torch.float64)
    torch.testing.assert_close(axis_map.apply(x, 1, reads=False), torch.einsum("ds,asb->adb", axis_map.dense(False), x))
    torch.testing.assert_close(axis_map.apply(x, 1, reads=True), torch.einsum("sd,asb->adb", axis_map.dense(True), x))


def test_a_group_of_three_is_averaged_and_shared_by_thirds() -> None:
    groups = ((0, 1, 2), (3,))
    thirds = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0], [0, 0, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(merge(groups).dense(False), thirds)
    torch.testing.assert_close(split(groups).dense(True), thirds)


def test_noise_makes_shares_uneven_and_the_seed_repeats_them() -> None:
    groups = adjacent(8, 4)
    shares = split(groups, 0.5, seed=1).read.view(4, 2)
    torch.testing.assert_close(shares.sum(1), torch.ones(4, dtype=torch.float64))
    assert (shares[:, 0] - shares[:, 1]).abs().min() > 1e-3
    assert torch.equal(split(groups, 0.5, seed=1).read, split(groups, 0.5, seed=1).read)
    assert not torch.equal(split(groups, 0.5, seed=1).read, split(groups, 0.5, seed=2).read)
    assert torch.equal(split(groups).read, torch.full((8, 1), 0.5, dtype=torch.float64))


@pytest.mark.parametrize(("new_layers", "shares"), [("copy", [1, 1]), ("halve", [0.5, 0.5]), ("identity", [1, 0])])
def test_new_layers_share_what_they_add_to_the_stream(new_layers: str, shares: list[float]) -> None:
    up, down = split_layers(((0, 1),), new_layers), merge_layers(((0, 1),), new_layers)  # type: ignore[arg-type]
    assert up.read[:, 0].tolist() == shares
    assert up.write[:, 0].tolist() == [1, 1]
    # coalesce inverts: the weights of a layer are averaged, what it adds is averaged ("copy") or summed.
    assert float((down.read @ up.read).squeeze()) == 1


def test_groups() -> None:
    assert adjacent(6, 3) == ((0, 1), (2, 3), (4, 5))
    assert stacked(6, 3) == ((0, 3), (1, 4), (2, 5))
    assert [len(group) for group in adjacent(7, 3)] == [2, 3, 2]
    assert partition([[2, 0], [1]], 3, "heads") == ((2, 0), (1,))


@pytest.mark.parametrize("groups", [[[0, 1], [1, 2]], [[0], [2]], [[0, 1, 2], []], [[0, 1, 3]]])
def test_groups_that_are_no_partition_are_named(groups: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"heads: the groups .* must hold each of 0 to 2 exactly once"):
        partition(groups, 3, "heads")


def test_a_length_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"resizes 4 entries, dimension 1 of \(2, 5\) has 5"):
        merge(adjacent(4, 2)).apply(torch.zeros(2, 5), 1, reads=False)
