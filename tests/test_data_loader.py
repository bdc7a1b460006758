"""The order of the batches, over epochs, ranks, workers and resumes."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from mlframe.data.loader import Key, ResumableLoader, ResumableSampler, evaluation_batches


class Keys(Dataset):
    """Gives its key back, so that what a loader yields is the order itself."""

    def __getitem__(self, key: Key) -> torch.Tensor:
        return torch.tensor(key)


def keys(sampler: ResumableSampler, epoch: int = 0) -> list[Key]:
    sampler.set_epoch(epoch)
    return [key for batch in sampler for key in batch]


def loader(workers: int = 0, size: int = 24, **kwargs: int) -> ResumableLoader:
    return ResumableLoader(Keys(), ResumableSampler(size, 4, **kwargs), num_workers=workers,
                           persistent_workers=workers > 0)  # fmt: skip


def epoch_of(loader: ResumableLoader, epoch: int, count: int | None = None) -> list[list[list[int]]]:
    loader.batch_sampler.set_epoch(epoch)
    return [batch.tolist() for batch in islice(iter(loader), count)]


@given(
    batches=st.integers(1, 5), batch_size=st.integers(1, 4), world=st.integers(1, 4), tail=st.integers(0, 3),
    epoch=st.integers(0, 3), seed=st.integers(0, 2**32),
)  # fmt: skip
@settings(deadline=None)
def test_ranks_share_an_epoch_without_overlap(
    batches: int, batch_size: int, world: int, tail: int, epoch: int, seed: int
) -> None:
    size = batches * batch_size * world + min(tail, batch_size * world - 1)
    ranks = [ResumableSampler(size, batch_size, seed, rank, world) for rank in range(world)]
    seen = [keys(sampler, epoch) for sampler in ranks]
    assert {len(part) for part in seen} == {batches * batch_size}
    indices = [index for part in seen for index, _ in part]
    assert len(set(indices)) == len(indices) == batches * batch_size * world
    assert set(indices) <= set(range(size))
    assert {draw for part in seen for _, draw in part} == {epoch}


def test_a_global_batch_does_not_depend_on_the_number_of_ranks() -> None:
    alone = list(ResumableSampler(24, 8))
    ranks = [list(ResumableSampler(24, 4, rank=rank, world=2)) for rank in (0, 1)]
    for batch, first, second in zip(alone, *ranks, strict=True):
        assert sorted(batch) == sorted(first + second)


def test_order_is_a_function_of_seed_and_epoch() -> None:
    sampler = ResumableSampler(64, 8, seed=3)
    first, second = keys(sampler, 0), keys(sampler, 1)
    assert [index for index, _ in first] != [index for index, _ in second]
    assert keys(sampler, 0) == first == keys(ResumableSampler(64, 8, seed=3))
    assert keys(ResumableSampler(64, 8, seed=4)) != first


def test_repeats_come_in_a_row_and_keep_the_length_of_the_epoch() -> None:
    taken = keys(ResumableSampler(24, 4, repeats=3), epoch=2)
    assert len(taken) == 24
    assert len({index for index, _ in taken}) == 8
    assert taken[0][0] == taken[1][0] == taken[2][0]
    assert [draw for _, draw in taken] == [6, 7, 8] * 8


def test_repeats_of_an_item_go_to_different_ranks() -> None:
    first, second = (keys(ResumableSampler(24, 4, rank=rank, world=2, repeats=2)) for rank in (0, 1))
    assert [index for index, _ in first] == [index for index, _ in second]
    assert [{draw for _, draw in part} for part in (first, second)] == [{0}, {1}]


def test_an_epoch_holds_whole_accumulated_steps() -> None:
    for size in (24, 27, 35):
        batches = len(list(ResumableSampler(size, 4, accumulate=3)))
        assert batches == len(ResumableSampler(size, 4, accumulate=3)) == size // 12 * 3


def test_too_few_items_name_the_batch_size_that_fits() -> None:
    with pytest.raises(ValueError, match=r"7 items, fewer than the 8 of one step \(4 on 2 .* set data.batch_size to 3"):
        ResumableSampler(7, 4, world=2)
    with pytest.raises(ValueError, match="rank=2"):
        ResumableSampler(24, 4, rank=2, world=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_in_mid_epoch_gives_the_rest_and_then_whole_epochs(workers: int) -> None:
    whole, following = epoch_of(loader(), 1), epoch_of(loader(), 2)
    for done in range(len(whole)) if workers == 0 else (1, 4):
        stopped = loader(workers)
        assert epoch_of(stopped, 1, done) == whole[:done]
        resumed = loader(workers)
        resumed.load_state_dict(stopped.state_dict() if done else {"epoch": 1, "items": 0})
        assert resumed.state_dict() == {"epoch": 1, "items": 4 * done}  # also before the first batch
        assert len(resumed) == 6
        assert epoch_of(resumed, 1) == whole[done:]
        assert epoch_of(resumed, 2) == following


def test_a_place_in_one_epoch_does_not_count_in_another() -> None:
    finished = loader()
    epoch_of(finished, 0)
    resumed = loader()
    resumed.load_state_dict(finished.state_dict())
    assert epoch_of(resumed, 1) == epoch_of(loader(), 1)


def test_state_counts_items_over_all_ranks_not_what_workers_prefetched() -> None:
    two = loader(workers=2, rank=1, world=2)
    epoch_of(two, 0, 1)
    assert two.state_dict() == {"epoch": 0, "items": 8}
    alone = loader()
    alone.load_state_dict(two.state_dict())
    assert epoch_of(alone, 0) == epoch_of(loader(), 0)[2:]


def test_nothing_is_drawn_before_set_epoch() -> None:
    resumable = loader()
    iterator = iter(resumable)  # Lightning does this first on resume
    resumable.batch_sampler.set_epoch(3)
    assert next(iterator).tolist() == epoch_of(loader(), 3)[0]


def test_persistent_workers_survive_an_epoch_left_early() -> None:
    resumable = loader(workers=2)
    epoch_of(resumable, 0, 2)
    assert epoch_of(resumable, 1) == epoch_of(loader(), 1)
    assert epoch_of(resumable, 2) == epoch_of(loader(), 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_random_stream_is_left_alone(workers: int) -> None:
    before = torch.get_rng_state()
    epoch_of(loader(workers), 0)
    assert torch.equal(torch.get_rng_state(), before)


@given(size=st.integers(1, 60), batch_size=st.integers(1, 9), world=st.integers(1, 5))
def test_evaluation_takes_every_item_once_in_equally_many_batches(size: int, batch_size: int, world: int) -> None:
    if size < world:
        with pytest.raises(ValueError, match="use fewer"):
            evaluation_batches(size, batch_size, 0, world)
        return
    ranks = [evaluation_batches(size, batch_size, rank, world) for rank in range(world)]
    assert sorted(index for rank in ranks for batch in rank for index in batch) == list(range(size))
    assert len({len(rank) for rank in ranks}) == 1
    lengths = [len(batch) for rank in ranks for batch in rank]
    assert min(lengths) > 0
    assert max(lengths) <= max(batch_size, 2)
