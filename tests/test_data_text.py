"""TextData from documents to batches: which rows, in which order, on which rank, and what is masked."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import Tensor

from mlframe.data.text import TextData
from mlframe.data.text_sources import Split, Texts
from mlframe.train import CONF

LENGTH, BATCH = 16, 4


def documents(start: int) -> Iterator[tuple[Split, str]]:
    for number in range(start, 200):
        split: Split = "val" if number % 10 == 8 else "test" if number % 10 == 9 else "train"
        noise = hashlib.sha256(str(number).encode()).hexdigest()  # so that no two rows are equal
        yield split, f"{noise[:30]} [SEP] {noise[30:40]} <|endoftext|> here."


TEXTS = Texts(documents, "the test's documents", "documents")
KINDS = {"causal": "bpe", "masked": "wordpiece"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


def data(folder: Path, objective: str = "causal", **settings: Any) -> TextData:
    rank, world = settings.pop("place", (0, 1))
    texts = settings.pop("texts", TEXTS)
    settings = {"tokenizer": KINDS.get(objective, "bpe"), "vocab_size": 300, "sequence_length": LENGTH,
                "batch_size": BATCH, "eval_batch_size": 8, **settings}  # fmt: skip
    made = TextData(lambda: texts, objective=objective, folder=folder, **settings)
    made.trainer = SimpleNamespace(global_rank=rank, world_size=world, accumulate_grad_batches=1)  # type: ignore[assignment]
    return made


def taken(loader: Any, epoch: int = 0, count: int | None = None) -> list[tuple[Tensor, ...]]:
    if hasattr(loader.batch_sampler, "set_epoch"):
        loader.batch_sampler.set_epoch(epoch)
    return list(islice(iter(loader), count))


def equal(first: list[tuple[Tensor, ...]], second: list[tuple[Tensor, ...]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)
    )


def original(batch: tuple[Tensor, ...]) -> list[tuple[int, ...]]:
    """The rows before they were masked; of causal ones all tokens."""
    ids, *rest = batch
    if len(rest) == 1:
        return [tuple(row) for row in torch.cat([ids, rest[0][:, -1:]], dim=1).tolist()]
    return [tuple(row) for row in ids.scatter(1, *rest).tolist()]


def stored(made: TextData, split: Split) -> list[tuple[int, ...]]:
    made.setup()
    return [tuple(row) for row in made._rows[split][:].tolist()]


@pytest.mark.parametrize(("objective", "predictions"), [("causal", 16), ("masked", 2)])
def test_batches_and_what_a_row_is(folder: Path, objective: str, predictions: int) -> None:
    made = data(folder, objective)
    assert made.sample == {"tokens": 16, "predictions": predictions}  # before anything is read
    for loader, size in ((made.train_dataloader(), BATCH), (made.val_dataloader(), 8), (made.test_dataloader(), 8)):
        ids, *rest = next(iter(loader))
        assert ids.shape[1:] == (16,)
        assert size // 2 < len(ids) <= size
        assert [part.shape for part in rest] == [(len(ids), predictions)] * (1 if objective == "causal" else 2)
        assert {part.dtype for part in (ids, *rest)} == {torch.int64}
        assert all(part.is_contiguous() for part in (ids, *rest))
        if objective == "causal":
            assert torch.equal(ids[:, 1:], rest[0][:, :-1])


def test_the_text_comes_back_and_only_documents_end(folder: Path) -> None:
    made = data(folder)
    rows = torch.tensor(stored(made, "train"))
    stream = [*rows[0].tolist(), *rows[1:, 1:].flatten().tolist()]
    pieces = made.about()["tokenizer"].decode(stream).replace("<|endoftext|> here.", "LITERAL").split("<|endoftext|>")
    texts = [text.replace("<|endoftext|> here.", "LITERAL") for split, text in documents(0) if split == "train"]
    assert pieces[:-1] == texts[: len(pieces) - 1]
    assert len(texts) - len(pieces) <= 1
    assert stream.count(0) == len(pieces) - 1


def test_masked_rows_are_between_cls_and_sep_and_hide_words(folder: Path) -> None:
    made = data(folder, "masked")
    batches = taken(made.train_dataloader())
    rows = torch.tensor([row for batch in batches for row in original(batch)])
    assert (rows[:, 0] == 2).all()
    assert (rows[:, -1] == 3).all()
    assert (rows[:, 1:-1] == 3).sum() in range(155, 161)  # one for each of the 160 documents but the tail
    targets = torch.cat([targets for *_, targets in batches])
    assert not torch.isin(targets, torch.tensor([0, 1, 2, 3, 4])).any()
    assert any((ids == 4).any() for ids, *_ in batches)


@pytest.mark.parametrize("objective", KINDS)
def test_every_row_comes_once_an_epoch_over_all_ranks(folder: Path, objective: str) -> None:
    rows = stored(data(folder, objective), "train")
    assert len(set(rows)) == len(rows) > 40
    for world in (1, 2):
        ranks = [taken(data(folder, objective, place=(rank, world)).train_dataloader(), 3) for rank in range(world)]
        seen = [row for rank in ranks for batch in rank for row in original(batch)]
        assert len(seen) == len(set(seen)) == len(rows) // (BATCH * world) * BATCH * world
        assert set(seen) <= set(rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_inside_an_epoch_gives_the_rest(folder: Path, workers: int) -> None:
    whole = taken(data(folder, "masked").train_dataloader(), 2)
    stopped = data(folder, "masked", workers=workers).train_dataloader()
    assert equal(taken(stopped, 2, 3), whole[:3])
    resumed = data(folder, "masked", workers=workers).train_dataloader()
    resumed.load_state_dict(stopped.state_dict())
    assert equal(taken(resumed, 2), whole[3:])


def test_masks_follow_the_epoch_and_the_seed_and_not_the_ranks(folder: Path) -> None:
    def masks(epoch: int, place: tuple[int, int] = (0, 1), **settings: Any) -> dict[tuple[int, ...], list[int]]:
        batches = taken(data(folder, "masked", place=place, **settings).train_dataloader(), epoch)
        return {row: ids for batch in batches for row, ids in zip(original(batch), batch[0].tolist(), strict=True)}

    first, later, seeded, half = masks(0), masks(1), masks(0, seed=1), masks(0, (1, 2))
    for other in (later, seeded):
        shared = first.keys() & other.keys()
        assert len(shared) > 40
        assert sum(first[row] != other[row] for row in shared) > 0.9 * len(shared)
    assert half
    assert all(first[row] == ids for row, ids in half.items() if row in first)


@pytest.mark.parametrize("objective", KINDS)
def test_evaluation_is_the_same_every_time_and_each_row_once(folder: Path, objective: str) -> None:
    made = data(folder, objective)
    for split, loader in (("val", made.val_dataloader), ("test", made.test_dataloader)):
        batches = taken(loader())
        assert [row for batch in batches for row in original(batch)] == stored(made, split)
        assert equal(batches, taken(loader()))
        ranks = [taken(getattr(data(folder, objective, place=(rank, 2)), f"{split}_dataloader")()) for rank in (0, 1)]
        assert len(ranks[0]) == len(ranks[1])
        assert sum(len(batch[0]) for rank in ranks for batch in rank) == len(stored(made, split))
        together = {row: ids for rank in ranks for batch in rank
                    for row, ids in zip(original(batch), batch[0].tolist(), strict=True)}  # fmt: skip
        alone = {row: ids for batch in batches for row, ids in zip(original(batch), batch[0].tolist(), strict=True)}
        assert together == alone


def test_val_samples_are_spread_and_the_test_takes_all(folder: Path) -> None:
    made = data(folder, val_samples=5)
    rows = stored(made, "val")
    chosen = [row for batch in taken(made.val_dataloader()) for row in original(batch)]
    assert chosen == [rows[i * len(rows) // 5] for i in range(5)]
    assert sum(len(batch[0]) for batch in made.test_dataloader()) == len(stored(made, "test"))
    assert sum(len(batch[0]) for batch in data(folder, val_samples=10**6).val_dataloader()) == len(rows)


@pytest.mark.parametrize("workers", [0, 2])
def test_loading_leaves_the_global_stream_alone_and_warns_of_nothing(
    tmp_path: Path, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_rng_state()
    made = data(tmp_path, workers=workers)  # trains and tokenises in this process, then forks
    taken(made.train_dataloader())
    taken(made.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)
    assert "parallelism" not in capfd.readouterr().err


def test_setup_reads_the_source_once(folder: Path) -> None:
    made, calls = data(folder), []
    source = made.source
    made.source = lambda: calls.append(1) or source()  # type: ignore[func-returns-value]
    made.prepare_data()
    made.setup("fit")
    made.train_dataloader()
    assert made.about()["tokenizer"] is made.about()["tokenizer"]
    assert calls == [1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"objective": "prefix"}, r"data\.objective=prefix: use causal or masked"),
        (
            {"objective": "masked", "sequence_length": 2},
            r"data\.sequence_length=2: a whole number of tokens, 3 or more",
        ),
        ({"mask": 0.0}, r"data\.mask=0\.0"),
        ({"val_samples": 0}, r"data\.val_samples=0: a whole number, 1 or more"),
        ({"objective": "masked", "tokenizer": "bpe"}, r"the tokenizer has no cls_token, which the objective needs"),
        ({"vocab_size": 200}, r"has 257 entries and the model 200: set model\.config\.vocab_size=257"),
        ({"sequence_length": 5000}, r"no whole row of 5001 tokens"),
        ({"batch_size": 10**6}, r"set data\.batch_size to \d+ or less"),
    ],
)
def test_errors_are_one_line(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
        data(folder, **settings).train_dataloader()


@pytest.mark.parametrize("name", ["docs", "text_files", "hf_text", "wikipedia_books"])
def test_the_configs_build(name: str) -> None:
    model = {"tokenizer": "bpe", "objective": "causal", "config": {"vocab_size": 8192}}
    config = OmegaConf.create({"model": model, "data_dir": "data", "seed": 3,
                               "data": OmegaConf.load(CONF / "data" / f"{name}.yaml")})  # fmt: skip
    OmegaConf.update(config, "data.source.path", "set", force_add=name == "hf_text") if name == "hf_text" else None
    made = instantiate(config.data)
    assert isinstance(made, TextData)
    assert made.sample == {"tokens": 128, "predictions": 128}
    assert made.seed == 3
