"""Packing, and the pass over the documents: killed, raced, out of space, and found again."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from mlframe.data import tokens
from mlframe.data.text_sources import SPLITS, Split, Texts
from mlframe.data.tokens import Packing, Rows, causal, masked, token_rows

END, CLS, SEP = 0, 1, 2
COUNT = 300  # documents
PACKING = causal(16, END)


def encoder(words: int = 500) -> Tokenizer:
    """The word "w7" is 7; the first three are for the boundaries."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def document(number: int) -> tuple[Split, list[int]]:
    draw = np.random.default_rng(number)
    split: Split = "train" if number % 5 else "val" if number % 10 else "test"
    return split, draw.integers(3, 500, draw.integers(1, 40)).tolist()


def documents(start: int, count: int = COUNT) -> Iterator[tuple[Split, str]]:
    for number in range(start, count):
        split, ids = document(number)
        yield split, " ".join(f"w{i}" for i in ids)


TEXTS = Texts(documents, "the test's words", "words")


def content(rows: dict[Split, Rows]) -> dict[Split, bytes]:
    return {split: rows[split].path.read_bytes() for split in SPLITS}


# packing

STREAMS = st.lists(st.lists(st.integers(3, 99), max_size=30), max_size=12)


def packed(packing: Packing, lists: list[list[int]], cuts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows, what is left, and the whole stream, when it arrives in pieces."""
    stream = np.array([token for ids in lists for token in (*ids, packing.end)], dtype=np.int64)
    rows, rest = [np.empty((0, packing.width), dtype=np.int64)], stream[:0]
    for piece in np.split(stream, sorted(cut % (len(stream) + 1) for cut in cuts)):
        new, rest = packing.rows(np.concatenate([rest, piece]))
        rows.append(new)
    return np.concatenate(rows), rest, stream


@given(lists=STREAMS, length=st.integers(1, 20), cuts=st.lists(st.integers(0, 999), max_size=4))
@settings(deadline=None)
def test_causal_rows_predict_each_token_once(lists: list[list[int]], length: int, cuts: list[int]) -> None:
    rows, rest, stream = packed(causal(length, END), lists, cuts)
    assert rows.shape[1] == length + 1
    inputs, targets = rows[:, :-1].ravel(), rows[:, 1:].ravel()
    assert inputs.tolist() == stream[: len(inputs)].tolist()
    assert targets.tolist() == stream[1 : len(targets) + 1].tolist()
    assert len(rest) == len(stream) - len(inputs) <= length


@given(lists=STREAMS, length=st.integers(3, 20), cuts=st.lists(st.integers(0, 999), max_size=4))
@settings(deadline=None)
def test_masked_rows_hold_the_stream_between_cls_and_sep(lists: list[list[int]], length: int, cuts: list[int]) -> None:
    rows, rest, stream = packed(masked(length, CLS, SEP), lists, cuts)
    assert rows.shape[1] == length
    assert (rows[:, 0] == CLS).all()
    assert (rows[:, -1] == SEP).all()
    assert [*rows[:, 1:-1].ravel().tolist(), *rest.tolist()] == stream.tolist()
    assert len(rest) < length - 2


@pytest.mark.parametrize("packing", [PACKING, masked(16, CLS, SEP)])
def test_the_files_hold_each_splits_own_documents(tmp_path: Path, packing: Packing) -> None:
    rows = token_rows(TEXTS, encoder(), packing, tmp_path)
    for split in SPLITS:
        lists = [ids for where, ids in map(document, range(COUNT)) if where == split]
        assert rows[split][:].tolist() == packed(packing, lists, [])[0].tolist()
        assert rows[split][[2, 0]].dtype == np.int64
        assert rows[split].rows.dtype == np.uint16


def test_long_documents_are_cut_before_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = content(token_rows(TEXTS, encoder(), PACKING, tmp_path / "whole"))
    monkeypatch.setattr(tokens, "BATCH", 20)
    assert max(len(piece) for batch in tokens.batches(documents(0)) for _, piece, _ in batch) <= 20
    assert content(token_rows(TEXTS, encoder(), PACKING, tmp_path / "cut", save_seconds=0)) == whole
    unspaced = list(tokens.batches(iter([("train", "x" * 50)])))
    lengths = [[(len(piece), last) for _, piece, last in batch] for batch in unspaced]
    assert lengths == [[(20, False)], [(20, False)], [(10, True)]]
    assert list(tokens.batches(iter([("train", ""), ("val", "x")]))) == [[("train", "", True), ("val", "x", True)]]


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    texts = Texts(lambda start: iter([("train", "w70000 w3 w4"), ("val", "w3 w69999")]), "", "")
    rows = token_rows(texts, encoder(70_001), causal(1, END), tmp_path)
    assert rows["train"].rows.dtype == np.uint32
    assert rows["train"][:].tolist() == [[70_000, 3], [3, 4], [4, END]]
    assert rows["test"] is rows["val"]


def test_no_text_spells_a_boundary(tmp_path: Path) -> None:
    pieces = [("<unk>", -9.0), ("</s>", 0.0), *((letter, -3.0) for letter in "</s> ab")]
    unigram = Tokenizer(models.Unigram(pieces, unk_id=0))
    assert 1 in unigram.encode("a</s>b").ids  # as T5's does
    texts = Texts(lambda start: iter([("train", "a</s>b a"), ("val", "b</s>")]), "", "")
    rows = token_rows(texts, unigram, causal(1, 1), tmp_path)
    assert [(row == 1).sum() for row in (rows["train"][:-1], rows["train"][-1], rows["val"][-1])] == [0, 1, 1]


# the cache


def test_the_key_tells_apart_what_makes_other_rows(tmp_path: Path) -> None:
    def place(texts: Texts = TEXTS, tokenizer: Tokenizer | None = None, packing: Packing = PACKING) -> Path:
        return token_rows(texts, tokenizer or encoder(), packing, tmp_path)["train"].path

    first = place()
    changed = first.stat().st_mtime_ns
    assert place(Texts(TEXTS.documents, "elsewhere", TEXTS.key)) == first
    assert first.stat().st_mtime_ns == changed
    others = [place(replace(TEXTS, key="other")), place(tokenizer=encoder(501)), place(packing=causal(17, END)),
              place(packing=causal(16, 1)), place(packing=masked(16, CLS, SEP))]  # fmt: skip
    assert len({first, *others}) == 6


def test_found_tokens_need_no_documents(tmp_path: Path) -> None:
    def gone(start: int) -> Iterator[tuple[Split, str]]:
        raise AssertionError("read again")

    first = content(token_rows(TEXTS, encoder(), PACKING, tmp_path))
    assert content(token_rows(replace(TEXTS, documents=gone), encoder(), PACKING, tmp_path)) == first


def test_errors_are_one_line(tmp_path: Path) -> None:
    def rows_of(*pairs: tuple[Split, str]) -> dict[Split, Rows]:
        return token_rows(Texts(lambda start: iter(pairs), "here", repr(pairs)), encoder(), causal(4, END), tmp_path)

    with pytest.raises(ValueError, match=r"^here: the training split has no whole row of 5 tokens: give .*$"):
        rows_of(("val", "w3 w4 w5 w6"))
    with pytest.raises(ValueError, match=r"^here: the validation split has no whole row .* data\.source\.holdout .*$"):
        rows_of(("train", "w3 w4 w5 w6"))
    rows = rows_of(("train", "w3 w4 w5 w6"), ("val", "w3 w4 w5 w6"))
    os.truncate(rows["train"].path, 0)
    with pytest.raises(ValueError, match=r"lacks rows of train: delete it and run again$"):
        rows_of(("train", "w3 w4 w5 w6"), ("val", "w3 w4 w5 w6"))


# other processes


def child(folder: str, what: str, number: str) -> None:
    """One pass that dies, or runs out of space, at a moment; prints where it began and how many documents it read."""
    kind, moment, read, began = what, int(number), 0, -1
    tokens.BATCH = 150  # cuts documents, so that a state in the middle of one would show

    def watched(start: int) -> Iterator[tuple[Split, str]]:
        nonlocal read, began
        began = start
        for pair in documents(start):
            if kind == "document" and start + read == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "slow":
                time.sleep(0.002)
            read += 1
            yield pair

    moved, replace_file = 0, os.replace

    def counted(source: Path, target: Path) -> None:
        nonlocal moved
        if (kind == "move" and Path(target).suffix == ".bin") or Path(target).name == "index.json":
            moved += 1
            if kind == "move" and moved == moment:
                os.kill(os.getpid(), signal.SIGKILL)
        replace_file(source, target)

    os.replace = counted
    if kind == "space":
        resource.setrlimit(resource.RLIMIT_FSIZE, (moment, moment))
    try:
        token_rows(replace(TEXTS, documents=watched), encoder(), PACKING, Path(folder), save_seconds=0)
    except ValueError as error:
        print(error)
    print(began, read)


def start_child(folder: Path, what: str = "", number: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import sys, test_data_tokens; test_data_tokens.child(*sys.argv[1:])"]
    return subprocess.Popen([*command, str(folder), what, str(number)], stdout=subprocess.PIPE, text=True,
                            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)})  # fmt: skip


def gone_on(folder: Path) -> tuple[int, int, dict[Split, bytes]]:
    """Where the next pass begins, how many documents it reads, and what there is in the end."""
    began = read = 0

    def watched(start: int) -> Iterator[tuple[Split, str]]:
        nonlocal began, read
        began = start
        for pair in documents(start):
            read += 1
            yield pair

    rows = token_rows(replace(TEXTS, documents=watched), encoder(), PACKING, folder)
    return began, read, content(rows)


def finished(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    out, _ = process.communicate(timeout=60)
    return process.returncode, out.splitlines()


def test_a_killed_pass_goes_on_to_the_same_bytes(tmp_path: Path) -> None:
    expected = content(token_rows(TEXTS, encoder(), PACKING, tmp_path / "whole"))
    moments = [("document", 0), ("document", 100), ("move", 2), ("move", 4)]
    for moment in moments:
        assert finished(start_child(tmp_path / "killed", *moment)) == (-signal.SIGKILL, [])
    assert gone_on(tmp_path / "killed") == (COUNT, 0, expected)  # nothing is read again
    assert finished(start_child(tmp_path / "early", "document", 200))[0] == -signal.SIGKILL
    (part,) = (tmp_path / "early").glob("*/train.part")
    with part.open("ab") as file:
        file.write(b"half a row")  # what the state does not know of
    began, read, found = gone_on(tmp_path / "early")
    assert 150 < began <= 200
    assert began + read == COUNT
    assert found == expected


def test_a_state_without_its_files_begins_again(tmp_path: Path) -> None:
    expected = content(token_rows(TEXTS, encoder(), PACKING, tmp_path / "whole"))
    finished(start_child(tmp_path / "killed", "document", 200))
    (part,) = (tmp_path / "killed").glob("*/train.part")
    part.unlink()
    assert gone_on(tmp_path / "killed") == (0, COUNT, expected)


def test_a_full_disk_is_one_line_and_the_pass_goes_on(tmp_path: Path) -> None:
    expected = content(token_rows(TEXTS, encoder(), PACKING, tmp_path / "whole"))
    limit = len(expected["train"]) // 2
    code, lines = finished(start_child(tmp_path / "full", "space", limit))
    assert code == 0
    assert "cannot be written (File too large): make room and run again" in lines[0]
    began, _, found = gone_on(tmp_path / "full")
    assert began > 50
    assert found == expected


def test_of_two_processes_one_works_and_one_waits(tmp_path: Path) -> None:
    both = [start_child(tmp_path, "slow") for _ in range(2)]
    reports = sorted(finished(process)[1][0] for process in both)
    assert reports == ["-1 0", f"0 {COUNT}"]
    whole = content(token_rows(TEXTS, encoder(), PACKING, tmp_path / "whole"))
    assert content(token_rows(TEXTS, encoder(), PACKING, tmp_path)) == whole
