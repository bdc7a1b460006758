"""Text files and Hugging Face data sets, made here; no network."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlframe.data import text_sources
from mlframe.data.text_sources import Texts, hf_text, text_files

MANY = [f"document {i}: {i * 7919:x}" for i in range(500)]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def splits(texts: Texts) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    for split, text in texts.documents(0):
        found[split].append(text)
    return found


def write(path: Path, texts: list[str], column: str = "text") -> str:
    """A file of the kind that its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".json" in path.name:
        data = "".join(json.dumps({column: text, "id": 1}) + "\n" for text in texts).encode()
    else:
        data = "\n\n".join(texts).encode()
    if path.suffix == ".parquet":
        pq.write_table(pa.table({column: texts, "id": [1] * len(texts)}), path)
    else:
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


# files


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.parquet"])
def test_rows_are_documents(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name, MANY, "body")
    found = splits(text_files(file, column="body", holdout=0.1))
    assert sorted(found["train"] + found["val"] + found["test"]) == sorted(MANY)
    assert 20 < len(found["val"]) < 90
    assert 20 < len(found["test"]) < 90


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize(("sample_by", "count"), [("document", 1), ("paragraph", 2), ("line", 3)])
def test_a_text_file_is_a_document_or_many(tmp_path: Path, name: str, sample_by: str, count: int) -> None:
    file = write(tmp_path / name, ["one\ntwo", "three"])
    val = write(tmp_path / "val.txt", ["four"])
    found = splits(text_files(file, val, sample_by=sample_by))
    assert len(found["train"]) == count
    assert found["val"] == ["four"]
    assert found["test"] == []


def test_folders_patterns_and_lists_and_several_kinds(tmp_path: Path) -> None:
    write(tmp_path / "in" / "deep" / "a.txt", ["alpha"])
    write(tmp_path / "in" / "b.jsonl", ["beta"])
    write(tmp_path / "in" / "readme.md", ["no text"])
    val = [write(tmp_path / "c.parquet", ["gamma"]), write(tmp_path / "d.txt", ["delta"])]
    found = splits(text_files(str(tmp_path / "in"), val, str(tmp_path / "?.txt")))
    assert sorted(found["train"]) == ["alpha", "beta"]
    assert sorted(found["val"]) == ["delta", "gamma"]
    assert found["test"] == ["delta"]
    assert splits(text_files(str(tmp_path / "in/**/*.txt"), val))["train"] == ["alpha"]


def test_the_key_follows_the_files_and_the_settings(tmp_path: Path) -> None:
    file = Path(write(tmp_path / "a.jsonl", MANY))

    def key(**settings: Any) -> str:
        return text_files(str(file), **settings).key

    first = key()
    assert key() == first
    assert len({first, key(holdout=0.1), key(column="id"), key(val=str(file))}) == 4
    file.write_text(file.read_text().replace("document 7:", "document x:"))
    os.utime(file, ns=(1, 1))
    assert key() != first


# what is held out


def test_equal_documents_fall_into_one_split_and_stay_there(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", MANY + MANY[::2])
    found = splits(text_files(str(tmp_path / "a.jsonl"), holdout=0.2))
    parts = [set(found[split]) for split in ("train", "val", "test")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == len(MANY)
    assert sum(map(len, found.values())) == 750
    write(tmp_path / "b.jsonl", [*MANY[::-1], "more"])  # other data around them, another order
    again = splits(text_files(str(tmp_path / "b.jsonl"), holdout=0.2))
    assert {split: set(found[split]) for split in found} == {split: set(again[split]) - {"more"} for split in again}


def test_what_given_splits_hold_is_not_trained_on(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", MANY)
    val, test = write(tmp_path / "val.jsonl", MANY[:20]), write(tmp_path / "test.jsonl", MANY[10:30])
    found = splits(text_files(file, val, test))
    assert sorted(found["train"]) == sorted(MANY[30:])
    assert sorted(found["val"]) == sorted(MANY[:20])  # as they are given
    assert sorted(found["test"]) == sorted(MANY[10:30])
    held = splits(text_files(file, test=test, holdout=0.1))
    assert sorted(held["train"] + held["val"]) == sorted(MANY[:10] + MANY[30:])
    assert held["val"]


def test_blank_documents_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": " \\n"}\n{"text": null}\n{"text": "words"}\n{"text": ""}\n')
    assert [text for _, text in text_files(str(tmp_path / "a.jsonl")).documents(0)] == ["words"]


# order


def test_order_is_fixed_mixed_and_can_begin_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "BLOCK", 10)
    texts = text_files(write(tmp_path / "a.parquet", MANY))
    whole = list(texts.documents(0))
    assert whole == list(texts.documents(0))
    for start in (1, 123, 499, 500, 600):
        assert list(texts.documents(start)) == whole[start:]
    numbers = [MANY.index(text) for _, text in whole]
    assert len({number // 100 for number in numbers[:100]}) >= 4  # the first fifth is a sample of all


# Hugging Face


def saved(folder: Path, **parts: list[str]) -> str:
    sets = {name: datasets.Dataset.from_dict({"text": texts, "id": [0] * len(texts)}) for name, texts in parts.items()}
    (sets["train"] if list(sets) == ["train"] else datasets.DatasetDict(sets)).save_to_disk(str(folder))
    return str(folder)


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    plain = hf_text(saved(tmp_path / "plain", train=MANY), holdout=0.1)
    assert sorted(text for _, text in plain.documents(0)) == sorted(MANY)
    whole = hf_text(saved(tmp_path / "whole", train=MANY, validation=["v"], test=["t"], other=["o"]))
    assert splits(whole) == {"train": splits(whole)["train"], "val": ["v"], "test": ["t"]}
    assert splits(hf_text(str(tmp_path / "whole"), val="other", test="validation"))["val"] == ["o"]
    assert plain.key != whole.key
    assert hf_text(str(tmp_path / "plain"), holdout=0.1).key == plain.key
    saved(tmp_path / "plain", train=MANY[1:])
    assert hf_text(str(tmp_path / "plain"), holdout=0.1).key != plain.key


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_of_files_streaming_or_not(tmp_path: Path, streaming: bool) -> None:
    write(tmp_path / "hub" / "train.jsonl", [*MANY, "v"])
    write(tmp_path / "hub" / "validation.jsonl", ["v"])
    texts = hf_text(str(tmp_path / "hub"), streaming=streaming)
    found = splits(texts)
    assert sorted(found["train"]) == sorted(MANY)
    assert found["val"] == ["v"]
    assert list(texts.documents(400)) == list(texts.documents(0))[400:]


@pytest.mark.parametrize("streaming", [False, True])
def test_several_data_sets_are_mixed(tmp_path: Path, streaming: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_sources, "BLOCK", 20)
    write(tmp_path / "a" / "train.jsonl", MANY)
    write(tmp_path / "b" / "train.jsonl", [f"sentence {i}" for i in range(105)], "body")
    sets = [{"path": str(tmp_path / "a")}, {"path": str(tmp_path / "b"), "column": "body", "join": 10}]
    texts = hf_text(sets=sets, holdout=0.1, streaming=streaming)
    order = [text for _, text in texts.documents(0)]
    books = [number for number, text in enumerate(order) if text.startswith("sentence")]
    assert len(books) == 11
    assert min(books) < 200
    assert max(books) < len(order) - 1
    assert "\n".join(f"sentence {i}" for i in range(20, 30)) in order
    assert "\n".join(f"sentence {i}" for i in range(100, 105)) in order
    assert str(tmp_path / "a") in texts.where
    assert hf_text(sets=[sets[0]], holdout=0.1, streaming=streaming).key != texts.key


# errors


def broken(name: str, data: bytes) -> Callable[[Path], Any]:
    def source(folder: Path) -> Texts:
        (folder / name).write_bytes(data)
        return text_files(str(folder / name))

    return source


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda folder: text_files(str(folder / "no*.txt")), r"data\.source\.train=.*: no \.txt, .* files there"),
        (lambda folder: text_files(str(folder)), r"no \.txt, .* files there"),
        (broken("a.doc", b"text"), r"a\.doc is none of \.txt, .*: convert it"),
        (broken("a.txt", b"\xff\xfe\x80" * 9), r"datasets cannot load the train files .*a\.txt.*utf-8.*: mend"),
        (broken("a.jsonl", b"no json\n"), r"a\.jsonl, line 1 is no JSON"),
        (broken("a.parquet", b"no"), r"datasets cannot load the train files .*a\.parquet"),
        (broken("a.jsonl", b'{"body": "x"}\n'), r"has no column 'text', it has \['body'\]: set data\.source\.column"),
        (broken("a.jsonl", b'{"text": 7}\n'), r"column 'text' holds int and not text"),
        (lambda folder: text_files("a", sample_by="word"), r"sample_by=word: use document, paragraph or line"),
        (lambda folder: text_files(write(folder / "a.txt", ["a"]), holdout=0.5), r"holdout=0\.5: there is no val"),
        (lambda folder: hf_text(), r"data\.source\.path is missing"),
        (lambda folder: hf_text(str(folder / "none")), r"datasets cannot load .*none .*: mend it or name another"),
        (lambda folder: hf_text(sets=[{"pth": "x"}]), r"sets has \['pth'\]: each set may have path, name"),
        (lambda folder: hf_text(saved(folder / "a", train=["a"]), val="dev"), r"the splits \['train'\], and no .*dev"),
        (lambda folder: hf_text(saved(folder / "a", train=["a"]), column="x"), r"no column 'x', it has \['text', "),
    ],
)  # fmt: skip
def test_errors_are_one_line(tmp_path: Path, source: Callable[[Path], Texts], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
        list(source(tmp_path).documents(0))
