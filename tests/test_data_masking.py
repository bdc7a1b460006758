"""Masks: how many, which, and that they depend on the key of the row alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlframe.data import augment
from mlframe.data.masking import EVALUATION, Masking, mixed

CLS, SEP, MASK, SIZE = 2, 3, 4, 1000
SPECIAL = [0, 1, CLS, SEP, MASK]


def masking(count: int = 19, seed: int = 0) -> Masking:
    return Masking(count, MASK, SPECIAL, SIZE, seed)


def rows(count: int, length: int = 128, separators: float = 0.05) -> np.ndarray:
    draw = np.random.default_rng(0)
    tokens = draw.integers(5, SIZE, (count, length))
    tokens[draw.random((count, length)) < separators] = SEP
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    return tokens


def keys(count: int, draw: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(count), np.full(count, draw)


@given(count=st.integers(1, 12), length=st.integers(12, 40), seed=st.integers(0, 2**40), draw=st.integers(-1, 99),
       separators=st.sampled_from([0.0, 0.3, 1.0]))  # fmt: skip
@settings(deadline=None, max_examples=60)
def test_every_row_has_exactly_as_many_targets(
    count: int, length: int, seed: int, draw: int, separators: float
) -> None:
    tokens = rows(5, length, separators)
    corrupted, positions, targets = masking(count, seed)(tokens, *keys(5, draw))
    assert positions.shape == targets.shape == (5, count)
    assert (np.diff(positions, axis=1) > 0).all()
    assert (np.take_along_axis(tokens, positions, 1) == targets).all()
    elsewhere = np.ones_like(tokens, dtype=bool)
    np.put_along_axis(elsewhere, positions, False, axis=1)
    assert (corrupted[elsewhere] == tokens[elsewhere]).all()
    assert corrupted.dtype == positions.dtype == targets.dtype == np.int64


@given(count=st.integers(1, 12), separators=st.sampled_from([0.1, 0.6, 0.9, 1.0]))
@settings(deadline=None, max_examples=40)
def test_special_tokens_are_chosen_last_and_the_ends_after_them(count: int, separators: float) -> None:
    tokens = rows(8, 12, separators)
    for row, chosen in zip(tokens, masking(count)(tokens, *keys(8))[1], strict=True):
        words = set(np.flatnonzero(~np.isin(row, SPECIAL)))
        inner = set(range(1, 11))
        assert set(chosen) <= words or words <= set(chosen)
        assert set(chosen) <= inner or inner <= set(chosen)


def test_eighty_ten_ten() -> None:
    tokens = rows(4000)
    corrupted, positions, targets = masking()(tokens, *keys(4000))
    shown = np.take_along_axis(corrupted, positions, 1)
    chance = 0.1 / (SIZE - len(SPECIAL))  # that a random token is the right one
    assert np.mean(shown == MASK) == pytest.approx(0.8, abs=0.005)
    assert np.mean(shown == targets) == pytest.approx(0.1 + chance, abs=0.004)
    replaced = shown[(shown != MASK) & (shown != targets)]
    assert len(replaced) / shown.size == pytest.approx(0.1 - chance, abs=0.004)
    assert not np.isin(replaced, SPECIAL).any()
    counts = np.bincount(replaced, minlength=SIZE)[5:]
    assert counts.std() == pytest.approx(counts.mean() ** 0.5, rel=0.15)  # as even as uniform draws are


def test_every_position_is_chosen_equally_often() -> None:
    positions = masking()(rows(4000, separators=0.0), *keys(4000))[1]
    share = np.bincount(positions.ravel(), minlength=128)[1:-1] / 4000
    assert share.mean() == pytest.approx(19 / 126)
    assert abs(share - share.mean()).max() < 4.5 * (19 / 126 * 107 / 126 / 4000) ** 0.5


def test_a_mask_depends_on_the_key_and_not_on_the_batch() -> None:
    tokens, (indices, draws) = rows(32), keys(32)
    whole = masking()(tokens, indices, draws)
    order = np.random.default_rng(1).permutation(32)[:7]
    for a, b in zip(whole, masking()(tokens[order], indices[order], draws[order]), strict=True):
        assert (a[order] == b).all()
    mixed_draws = np.where(indices % 2, 5, 0)
    for a, b, c in zip(
        whole, masking()(tokens, indices, mixed_draws), masking()(tokens, indices, draws + 5), strict=True
    ):
        assert (b == np.where(mixed_draws[:, None] == 5, c, a)).all()


def test_seeds_epochs_and_rows_differ() -> None:
    tokens = np.repeat(rows(1), 2, axis=0)
    indices, draws = keys(2)
    base = masking()(tokens, indices, draws)[1]
    assert (base[0] != base[1]).any()
    for other in (masking()(tokens, indices, draws + 1), masking()(tokens, indices, draws + EVALUATION),
                  masking(seed=1)(tokens, indices, draws)):  # fmt: skip
        assert (base != other[1]).any(axis=1).all()


@given(st.lists(st.integers(-5, 2**63 - 1), min_size=1, max_size=5))
@settings(deadline=None)
def test_the_hash_is_the_one_of_the_augmentation(numbers: list[int]) -> None:
    assert mixed(*(np.array([number]) for number in numbers)).item() == augment.mixed(*numbers)
