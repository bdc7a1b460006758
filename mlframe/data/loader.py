"""Batches whose order is a pure function of (seed, epoch) and whose place in the epoch can be saved and restored.

Use with `Trainer(use_distributed_sampler=False)`: the sampler already splits over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from mlframe.errors import check_whole

Key = tuple[int, int]  # (index into the dataset, draw): the dataset seeds its augmentation from it


class ResumableSampler(Sampler[list[Key]]):
    """A batch sampler over `size` items: yields lists of `batch_size` keys `(index, draw)` for this rank.

    `draw = epoch * repeats + repeat` tells apart the times that one item is taken, so that a dataset can make its
    augmentation a function of the key and not of the worker or of time. The last, incomplete batch is dropped, and all
    ranks give the same number of batches.

    Args:
        size: number of items in the dataset.
        batch_size: items in a batch of one rank.
        seed: with the epoch, decides the order.
        rank, world: this process and how many there are; a global batch is dealt out to them item by item.
        repeats: repeated augmentation (Hoffer et al. 2020, arXiv 1901.09335, as in DeiT): every chosen item comes
            `repeats` times in a row, an epoch stays `size` items long and thus sees 1/repeats of the items.
        accumulate: batches of an optimizer step; an epoch holds whole steps, as Lightning would take a short one at its
            end.

    Raises:
        ValueError: when there are too few items for one batch on every rank.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        repeats: int = 1,
        accumulate: int = 1,
    ):
        check_whole("data.batch_size", batch_size, 1)
        check_whole("data.repeats", repeats, 1)
        check_whole("trainer.accumulate_grad_batches", accumulate, 1)
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} of {world} processes: a rank is below their number")
        if size < (step := batch_size * world * accumulate):
            raise ValueError(
                f"the training set has {size} items, fewer than the {step} of one step ({batch_size} on {world} "
                f"process(es), accumulated {accumulate} times): set data.batch_size to "
                f"{max(1, size // (world * accumulate))} or less"
            )
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world, self.repeats, self.accumulate = rank, world, repeats, accumulate
        self.epoch = 0
        self.first_batch = 0  # where the next pass begins; ResumableLoader sets it
        self.sampler = self  # Lightning calls set_epoch on `loader.batch_sampler.sampler`

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        """Batches in a whole epoch, also when the next pass begins in its middle."""
        return self.size // (self.batch_size * self.world * self.accumulate) * self.accumulate

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(self.size, generator=generator)
        global_batch = self.batch_size * self.world
        for batch in range(self.first_batch, len(self)):
            # Striding gives the repeats of one item to different ranks, and makes the union over ranks the same
            # global batch for every number of ranks.
            places = torch.arange(batch * global_batch + self.rank, (batch + 1) * global_batch, self.world)
            items = order[places // self.repeats].tolist()
            draws = (places % self.repeats + self.epoch * self.repeats).tolist()
            yield list(zip(items, draws, strict=True))


class ResumableLoader(DataLoader):
    """A DataLoader over a ResumableSampler (given as `batch_sampler`) that Lightning saves and restores.

    The state is the epoch and how many items of it, over all ranks, have been handed out: what workers have prefetched
    does not count, and the state is the same on every rank.
    """

    batch_sampler: ResumableSampler

    def __init__(self, dataset: Any, batch_sampler: ResumableSampler, **kwargs: Any):
        # An own generator: a plain loader draws from the global one at every epoch, which would shift dropout.
        super().__init__(dataset, batch_sampler=batch_sampler, generator=torch.Generator(), **kwargs)
        self._epoch, self._items = 0, 0
        self._resuming = False

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: nothing runs before the first next(), hence after Lightning's set_epoch (on resume it asks for
        # the iterator first, lightning issue 21938).
        sampler = self.batch_sampler
        global_batch = sampler.batch_size * sampler.world
        in_same_epoch = self._resuming and self._epoch == sampler.epoch
        sampler.first_batch = self._items // global_batch if in_same_epoch else 0
        self._resuming = False
        self._epoch, self._items = sampler.epoch, sampler.first_batch * global_batch
        for batch in super().__iter__():
            self._items += global_batch
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "items": self._items}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch, self._items = state["epoch"], state["items"]
        self._resuming = True


def evaluation_batches(size: int, batch_size: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    """The indices that this rank evaluates, in batches: over all ranks every index exactly once.

    Every rank gets the same number of batches (sharded models hang otherwise), of nearly equal sizes of at most
    `batch_size` (one more where a rank would be left with an empty batch).

    Raises:
        ValueError: when there are fewer items than ranks, or no whole batch size.
    """
    check_whole("data.eval_batch_size", batch_size, 1)
    if size < world:
        raise ValueError(f"an evaluation set of {size} items cannot be split over {world} processes: use fewer")
    mine = list(range(rank, size, world))
    batches = min(math.ceil(size / (batch_size * world)), size // world)
    edges = [len(mine) * batch // batches for batch in range(batches + 1)]
    return [mine[start:stop] for start, stop in pairwise(edges)]
