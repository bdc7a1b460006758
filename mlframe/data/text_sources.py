"""Where documents come from: functions that return a `Texts`, for `source:` of `mlframe.data.text.TextData`."""

from __future__ import annotations

import glob
import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from mlframe.errors import ConfigError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

BLOCK = 1_000  # rows that are read together; the blocks come in a mixed order
KINDS = {".txt": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}  # what `datasets` calls them


@dataclass(frozen=True)
class Texts:
    """What a source returns.

    Attributes:
        documents: gives, from document number `start` on, pairs (split, text), always the same in the same order. The
            first ones are a fair sample of all: a tokenizer may be trained on them.
        where: where they are, for log lines.
        key: changes whenever the documents do.
    """

    documents: Callable[[int], Iterator[tuple[Split, str]]]
    where: str
    key: str


@dataclass(frozen=True)
class Part:
    """Some rows of a split: a Hugging Face data set with a column of text, `join` rows of which make a document."""

    split: Split
    rows: Any
    column: str
    join: int = 1

    def documents(self, rows: Mapping[str, Sequence[Any]]) -> tuple[Split, list[str]]:
        texts = [text for text in rows[self.column] if text is not None]
        if wrong := next((text for text in texts if not isinstance(text, str)), None):
            raise ConfigError(f"the column {self.column!r} holds {type(wrong).__name__} and not text: name another in "
                              "data.source.column")  # fmt: skip
        joined = ["\n".join(texts[start : start + self.join]) for start in range(0, len(texts), self.join)]
        return self.split, [text for text in joined if text.strip()]


def text_files(
    train: str | Sequence[str],
    val: str | Sequence[str] | None = None,
    test: str | Sequence[str] | None = None,
    holdout: float = 0.01,
    column: str = "text",
    sample_by: str = "document",
) -> Texts:
    """Own text: .txt, .jsonl or .json, and .parquet, also with .gz behind; read by `datasets`, which keeps a copy.

    Args:
        train, val, test: files, folders (all such files below them), patterns as "books/**/*.txt", or lists of these.
        holdout: see `hf_text`.
        column: of JSON and Parquet files, the one that holds the text.
        sample_by: what a document is in .txt files: "document" (a file), "paragraph" (up to an empty line) or "line".

    Raises:
        ValueError: for files that are missing, empty, of another kind or not UTF-8, and a missing column.
    """
    import datasets  # 2 s

    if sample_by not in ("document", "paragraph", "line"):
        raise ConfigError(f"data.source.sample_by={sample_by}: use document, paragraph or line")
    parts, marks = [], []
    chosen: dict[Split, Any] = {"train": train, "val": val, "test": test}
    for split, wanted in chosen.items():
        for kind, files in _files(split, wanted).items():
            options = {"sample_by": sample_by} if kind == "text" else {}
            with_text = "text" if kind == "text" else column
            names = [str(file) for file in files]
            try:
                rows = loaded(f"the {split} files {names[0]}, ...", datasets.load_dataset, kind, data_files=names,
                              split="train", **options)  # fmt: skip
            except ConfigError as error:
                raise _bad_line(files, column) or error from error
            parts.append(_part(split, rows, with_text, names[0]))
            if rows.data.column(with_text).null_count and (bad := _bad_line(files, column)):
                raise bad
            marks += [(split, str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return _texts(parts, holdout, f"the files of {train}", repr((marks, column, sample_by)))


def _bad_line(files: list[Path], column: str) -> ConfigError | None:
    """The first line of .jsonl that is no JSON or lacks the column; `datasets` counts from the start of a block."""
    for file in (file for file in files if ".jsonl" in file.suffixes):
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    if line.strip() and column not in json.loads(line):
                        return ConfigError(f"{file}, line {number} has no {column!r}: add it or take the line out")
                except (ValueError, TypeError) as error:
                    return ConfigError(f"{file}, line {number} is no JSON ({error}): mend it or take it out")
    return None


def _files(split: str, wanted: str | Sequence[str] | None) -> dict[str, list[Path]]:
    """The files by their kind, in order."""
    found: list[Path] = []
    for pattern in [wanted] if isinstance(wanted, str | Path) else wanted or []:
        path = Path(pattern).expanduser()
        listed = sorted(_below(path) if path.is_dir() else map(Path, glob.glob(str(path), recursive=True)))
        files = [file for file in listed if file.is_file() and (_kind(file) or not path.is_dir())]
        if not files:
            raise ConfigError(f"data.source.{split}={pattern}: no {', '.join(KINDS)} files there")
        found += files
    if unknown := next((file for file in found if not _kind(file)), None):
        raise ConfigError(f"{unknown} is none of {', '.join(KINDS)}: convert it to one of them")
    return {kind: [file for file in found if _kind(file) == kind] for kind in dict.fromkeys(map(_kind, found)) if kind}


def _below(folder: Path) -> Iterator[Path]:
    """All files below a folder. rglob would leave out without a word what may not be read."""

    def refuse(error: OSError) -> None:
        raise ConfigError(f"{error.filename} cannot be read ({error.strerror}): its text would be missing") from error

    for place, _, names in os.walk(folder, onerror=refuse):
        yield from (Path(place) / name for name in names)


def _kind(file: Path) -> str | None:
    return KINDS.get(file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix)


def hf_text(
    path: str | None = None,
    name: str | None = None,
    column: str = "text",
    train: str = "train",
    val: str | None = None,
    test: str | None = None,
    holdout: float = 0.01,
    streaming: bool = False,
    revision: str | None = None,
    join: int = 1,
    sets: Sequence[Mapping[str, Any]] = (),
) -> Texts:
    """A data set of the Hugging Face hub, or a folder that `save_to_disk` wrote, or several at once.

    No text that is evaluated on is trained on. Without a validation split, the part `holdout` of all documents becomes
    one by a hash of their text, and as much a test split where that is missing too; equal documents thus fall into one
    split. Training documents that equal one of a given validation or test split are left out: this keeps one number
    for each evaluated document in memory, and none for the training ones.

    Args:
        path, name, revision: as for `datasets.load_dataset`; no code of the data set is run.
        column: the one that holds the text.
        train, val, test: names of the splits. By default `val` is "validation" if there is one, and `test` "test".
        streaming: read from the hub instead of downloading first. The data are then taken to be the same as long as the
            arguments are: pin `revision`. Rows come in the order of their files.
        join: as many consecutive rows make a document, for data sets whose rows are sentences or lines.
        sets: several data sets, each a mapping of those of the arguments above (but `holdout`, `streaming`) in which it
            differs.

    Raises:
        ValueError: for what cannot be loaded, a missing split or column, or a column that is no text; names those there
            are.
    """
    common = {"path": path, "name": name, "column": column, "train": train, "val": val, "test": test,
              "revision": revision, "join": join}  # fmt: skip
    if unknown := sorted({key for one in sets for key in one} - set(common)):
        raise ConfigError(f"data.source.sets has {unknown}: each set may have {', '.join(common)}")
    parts, keys, names = [], [], []
    for one in sets or [{}]:
        chosen = {**common, **one}
        if chosen["path"] is None:
            raise ConfigError("data.source.path is missing: name a data set of the hub, or a folder of save_to_disk")
        parts += _hf_parts(**chosen, streaming=streaming)
        names.append(f"{chosen['path']} {chosen['name'] or ''}".strip())
        keys.append(chosen)
    fingerprints = [getattr(part.rows, "_fingerprint", None) for part in parts]
    return _texts(parts, holdout, f"{' + '.join(names)} (Hugging Face)", repr((keys, fingerprints)))


def _hf_parts(path: str, name: str | None, column: str, train: str, val: str | None, test: str | None,
              revision: str | None, join: int, streaming: bool) -> list[Part]:  # fmt: skip
    import datasets

    if any((Path(path) / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
        found = loaded(path, datasets.load_from_disk, path)
    else:
        found = loaded(path, datasets.load_dataset, path, name, revision=revision, streaming=streaming)
    found = dict(found) if isinstance(found, dict) else {"train": found}
    val = val or ("validation" if "validation" in found else None)
    test = test or ("test" if "test" in found else None)
    chosen: dict[Split, str | None] = {"train": train, "val": val, "test": test}
    if missing := {split: named for split, named in chosen.items() if named and named not in found}:
        raise ConfigError(f"{path} has the splits {sorted(found)}, and no {missing}: set "
                          f"data.source.{next(iter(missing))}")  # fmt: skip
    return [_part(split, found[named], column, path, join) for split, named in chosen.items() if named]


def loaded(what: str, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`load` of `datasets`, without its bars, and with one line where it cannot."""
    import datasets
    from datasets.exceptions import DatasetsError

    datasets.disable_progress_bars()  # ours tells how far the text is, and an error is one line
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        return load(*args, **kwargs)
    except StopIteration as error:
        raise ConfigError(f"{what}: no rows in it; name another") from error
    except (DatasetsError, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise ConfigError(f"datasets cannot load {what} ({reason}): mend it or name another") from error


def _part(split: Split, rows: Any, column: str, where: str, join: int = 1) -> Part:
    columns = rows.column_names or list(next(iter(rows), {}))  # a stream may not know before its first row
    if column not in columns:
        raise ConfigError(f"{where} has no column {column!r}, it has {columns}: set data.source.column")
    return Part(split, rows.select_columns([column]), column, join)


def _texts(parts: list[Part], holdout: float, where: str, key: str) -> Texts:
    given = {part.split for part in parts}
    if "val" not in given and not (isinstance(holdout, int | float) and 0 < holdout < 0.5):
        raise ConfigError(f"data.source.holdout={holdout}: there is no validation split, and it is the part of the "
                          "documents that becomes one; set it above 0 and below 0.5")  # fmt: skip
    held: list[Split] = [] if "val" in given else ["val"] if "test" in given else ["val", "test"]
    content = f"{key} {held and holdout}"
    return Texts(partial(_documents, parts, held, holdout), where, hashlib.sha256(content.encode()).hexdigest())


def _documents(parts: list[Part], held: list[Split], holdout: float, start: int) -> Iterator[tuple[Split, str]]:
    return islice(_all_documents(parts, held, holdout), start, None)


def _all_documents(parts: list[Part], held: list[Split], holdout: float) -> Iterator[tuple[Split, str]]:
    evaluated = {_hash(text) for part in parts if part.split != "train" for _, texts in _blocks([part])
                 for text in texts}  # fmt: skip
    for split, texts in _blocks(parts):
        for text in texts:
            if split != "train":
                yield split, text
            elif (number := _hash(text)) not in evaluated:
                place = int(number / 2**64 / holdout) if held else 0
                yield held[place] if held and place < len(held) else "train", text


def _blocks(parts: list[Part]) -> Iterator[tuple[Split, list[str]]]:
    """The documents of some consecutive rows at a time: blocks of what lies on disk mixed, streams in turns."""
    on_disk = [part for part in parts if hasattr(part.rows, "__len__")]
    places = [(part, start) for part in on_disk for start in range(0, len(part.rows), _block(part))]
    for number in np.random.default_rng(0).permutation(len(places)):
        part, start = places[number]
        yield part.documents(part.rows[start : start + _block(part)])
    streams = {part: part.rows.iter(_block(part)) for part in parts if part not in on_disk}
    while streams:
        for part, stream in list(streams.items()):
            if (rows := next(stream, None)) is None:
                del streams[part]
            else:
                yield part.documents(rows)


def _block(part: Part) -> int:
    return max(1, BLOCK // part.join) * part.join


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
