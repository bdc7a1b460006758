"""Masks for masked language modelling: what is hidden is a function of (seed, draw, index), drawn a batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EVALUATION = -1  # the draw of evaluation, which training never reaches
CHOICE, ACTION, TOKEN = range(3)  # independent random numbers of one position
MASKED, REPLACED = 0.8, 0.9  # below: [MASK]; up to: a random token; above: kept


class Masking:
    """Hides exactly `count` tokens of each row (Devlin et al. 2019, arXiv 1810.04805, section 3.1).

    Of those chosen, 80 % become the mask token, 10 % a random ordinary one, 10 % stay. Special tokens are chosen only
    where a row has fewer than `count` others, the first and the last of the row after all else: every row has as many
    targets, hence the mean over batches is the mean over tokens.

    Args:
        count: targets per row.
        mask: the id of the mask token.
        special: ids that are no words.
        size: how many ids there are.
        seed: with the keys of the rows, decides everything.
    """

    def __init__(self, count: int, mask: int, special: Sequence[int], size: int, seed: int):
        self.count, self.mask, self.seed = count, mask, seed
        self.special = np.isin(np.arange(size), special)
        self.ordinary = np.flatnonzero(~self.special)

    def __call__(
        self, rows: np.ndarray, indices: np.ndarray, draws: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows [B, T], keys [B] -> corrupted rows [B, T], positions [B, count] ascending, targets [B, count]."""
        keys = [np.full(1, self.seed), draws[:, None], indices[:, None]]
        late = self.special[rows].astype(np.uint64)
        late[:, [0, -1]] = 2
        order = mixed(*keys, np.arange(rows.shape[1]), np.full(1, CHOICE)) >> np.uint64(2) | late << np.uint64(62)
        positions = np.sort(np.argpartition(order, self.count - 1)[:, : self.count])
        targets = np.take_along_axis(rows, positions, axis=1)
        action = (mixed(*keys, positions, np.full(1, ACTION)) >> np.uint64(11)) * 2.0**-53  # uniform in [0, 1)
        drawn = self.ordinary[mixed(*keys, positions, np.full(1, TOKEN)) % np.uint64(len(self.ordinary))]
        shown = np.where(action < MASKED, self.mask, np.where(action < REPLACED, drawn, targets))
        corrupted = rows.copy()
        np.put_along_axis(corrupted, positions, shown, axis=1)
        return corrupted, positions, targets


def mixed(*numbers: np.ndarray) -> np.ndarray:
    """As `mlframe.data.augment.mixed`, elementwise on arrays of integers that broadcast (not 0-d): uint64."""
    state = np.zeros(1, dtype=np.uint64)
    for number in numbers:
        state = state + number.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state
