"""Documents to rows of tokens, once: tokenise, pack, and keep in files that are memory-mapped from then on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, astuple, dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tokenizers import Tokenizer

from mlframe.data.text_sources import SPLITS, Split, Texts
from mlframe.data.tokenizer import rust_threads
from mlframe.errors import ConfigError

log = logging.getLogger("mlframe.data")

FORMAT = 1  # of the files: raise it when the rows of the same documents change
BATCH = 2**20  # characters that are tokenised together, and the most in one piece
SAVE_SECONDS = 2.0  # between two records of how far the pass is


@dataclass(frozen=True)
class Packing:
    """How the documents of a split, one after the other with `end` after each, are cut into rows.

    A row takes `window` tokens between `before` and `after`, the next row begins `stride` tokens later. What is left at
    the end is less than a row, and dropped.
    """

    window: int
    stride: int
    end: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return len(self.before) + self.window + len(self.after)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The ids that only packing may set."""
        return (self.end, *self.before, *self.after)

    def rows(self, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The whole rows [N, width] in a stream of tokens [S], and the tokens with which the next row begins."""
        count = max(0, (len(stream) - self.window) // self.stride + 1)
        starts = np.arange(count)[:, None] * self.stride
        middle = stream[starts + np.arange(self.window)]
        before, after = (np.tile(np.array(ids, dtype=stream.dtype), (count, 1)) for ids in (self.before, self.after))
        return np.concatenate([before, middle, after], axis=1), stream[count * self.stride :]


def causal(length: int, end: int) -> Packing:
    """Rows of `length` + 1 tokens that overlap by one: each token but the very first is predicted once."""
    return Packing(length + 1, length, end)


def masked(length: int, first: int, last: int) -> Packing:
    """Rows `first`, `length` - 2 tokens, `last`, documents separated by `last`: FULL-SENTENCES of RoBERTa (Liu et al.
    2019, arXiv 1907.11692, section 4.2), without the prediction of next sentences."""
    return Packing(length - 2, length - 2, last, (first,), (last,))


class Rows:
    """A memory-mapped file of rows of tokens, [N, width]; gives int64."""

    def __init__(self, path: Path, dtype: str, width: int):
        self.path, self.dtype, self.width = path, dtype, width
        size = path.stat().st_size
        self.rows = np.memmap(path, dtype, "r").reshape(-1, width) if size else np.empty((0, width), dtype)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self.rows[indices].astype(np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.path, self.dtype, self.width)  # a worker maps the file, it does not get a copy


def token_rows(
    texts: Texts, encoder: Tokenizer, packing: Packing, folder: Path, save_seconds: float = SAVE_SECONDS
) -> dict[Split, Rows]:
    """The rows of each split, from `folder` where they are, else made there now; without a test split, validation's.

    A pass that was killed goes on where it was, and processes that come together wait for the first.

    Raises:
        ValueError: when a split has no whole row, the disk is full, or files are damaged.
    """
    content = "\n".join([str(FORMAT), texts.key, encoder.to_str(), json.dumps(astuple(packing))])
    place = folder / hashlib.sha256(content.encode()).hexdigest()[:16]
    index = place / "index.json"
    if not index.is_file():
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{place.name}.lock"):
            if not index.is_file():
                Pass(texts, encoder, packing, place, save_seconds).run()
    try:
        found = json.loads(index.read_text())
        row_bytes = found["width"] * np.dtype(found["dtype"]).itemsize
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} is damaged: delete its folder and run again") from error
    damaged = [s for s in SPLITS if (place / f"{s}.bin").stat().st_size != found["rows"][s] * row_bytes]
    if damaged:
        raise ConfigError(f"{place} lacks rows of {', '.join(damaged)}: delete it and run again")
    rows = {split: Rows(place / f"{split}.bin", found["dtype"], found["width"]) for split in SPLITS}
    if not len(rows["train"]):
        raise ConfigError(f"{texts.where}: the training split has no whole row of {packing.width} tokens: give it more "
                          "text, or set data.sequence_length lower")  # fmt: skip
    if not len(rows["val"]):
        raise ConfigError(f"{texts.where}: the validation split has no whole row of {packing.width} tokens: name one "
                          "in data.source.val, set data.source.holdout higher, or make more documents "
                          "of the same text (data.source.sample_by=paragraph)")  # fmt: skip
    return rows if len(rows["test"]) else {**rows, "test": rows["val"]}


@dataclass
class State:
    """How far a pass is: documents done, and of each split the tokens so far, the bytes written and what is pending."""

    documents: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    pending: dict[str, list[int]] = field(default_factory=lambda: {split: [] for split in SPLITS})


class Pass:
    """Tokenises all documents into the folder `place`.

    While it goes on there is SPLIT.part for each split, and state.json, which says how much of them counts; in the end
    SPLIT.bin and, last, index.json.
    """

    def __init__(self, texts: Texts, encoder: Tokenizer, packing: Packing, place: Path, save_seconds: float):
        self.texts, self.encoder, self.packing, self.place = texts, encoder, packing, place
        self.save_seconds = save_seconds
        self.size = max(encoder.get_vocab().values()) + 1
        self.text_ids = ~np.isin(np.arange(self.size), packing.boundaries)
        self.dtype = np.dtype(np.uint16 if self.size <= 2**16 else np.uint32)
        self.state = self._last_state()

    def run(self) -> None:
        began, saved, state = time.monotonic(), time.monotonic(), self.state
        where = f", from document {state.documents:,} on" if state.documents else ""
        log.info("tokenising %s into %s%s", self.texts.where, self.place, where)
        with ExitStack() as stack:
            files = {split: stack.enter_context(self._part(split)) for split in SPLITS}
            report = stack.enter_context(progress())
            stack.enter_context(rust_threads())
            for batch in batches(self.texts.documents(state.documents)):
                self._add(batch, files)
                report(state, sum(len(piece.encode()) for _, piece, _ in batch))
                whole = batch[-1][-1]  # else the last document would be begun again with a part of it written
                if whole and time.monotonic() - saved >= self.save_seconds:
                    self._save(files)
                    saved = time.monotonic()
            self._save(files)
        self._finish()
        log.info("tokenised %s documents to %s tokens in %.0f s", f"{state.documents:,}",
                 f"{sum(state.tokens.values()):,}", time.monotonic() - began)  # fmt: skip

    def _add(self, batch: list[Piece], files: dict[Split, FileIO]) -> None:
        """Writes the rows that a batch completes."""
        encoded = self.encoder.encode_batch_fast([piece for _, piece, _ in batch], add_special_tokens=False)
        ids = [np.array(one.ids, dtype=np.int64) for one in encoded]
        if (highest := int(np.concatenate(ids).max(initial=0))) >= self.size:
            raise ConfigError(f"the tokenizer has {self.size} entries and gave the id {highest}: it is broken")
        streams = {split: [np.array(self.state.pending[split], dtype=np.int64)] for split, _, _ in batch}
        for (split, _, last), tokens in zip(batch, ids, strict=True):
            # A few tokenizers can still spell a special token (Unigram has them among its pieces): that would be a
            # boundary inside a document.
            streams[split].append(tokens[self.text_ids[tokens]])
            if last:
                streams[split].append(np.array([self.packing.end]))
        for split, (pending, *new) in streams.items():
            rows, rest = self.packing.rows(np.concatenate([pending, *new]))
            with self._writing():
                append(files[split], rows.astype(self.dtype).tobytes())
            self.state.bytes[split] += rows.size * self.dtype.itemsize
            self.state.tokens[split] += sum(map(len, new))
            self.state.pending[split] = rest.tolist()
        self.state.documents += sum(last for *_, last in batch)

    def _part(self, split: Split) -> FileIO:
        file = FileIO(self.place / f"{split}.part", "a")
        file.truncate(self.state.bytes[split])
        return file

    def _last_state(self) -> State:
        """The state that a killed pass left, if the files that belong to it are there."""
        try:
            state = State(**json.loads((self.place / "state.json").read_text()))
            for split in SPLITS:
                part, done = self.place / f"{split}.part", self.place / f"{split}.bin"
                if done.exists():  # killed between this and index.json
                    os.replace(done, part)
                if part.stat().st_size < state.bytes[split]:
                    return State()
        except FileNotFoundError:
            return State()
        return state

    def _save(self, files: dict[Split, FileIO]) -> None:
        with self._writing():
            for file in files.values():
                os.fsync(file.fileno())
            self._write_json("state.json", asdict(self.state))

    def _finish(self) -> None:
        rows = {split: self.state.bytes[split] // (self.packing.width * self.dtype.itemsize) for split in SPLITS}
        for split in SPLITS:
            os.replace(self.place / f"{split}.part", self.place / f"{split}.bin")
        index = {"dtype": self.dtype.name, "width": self.packing.width, "rows": rows,
                 "documents": self.state.documents, "tokens": self.state.tokens, "from": self.texts.where}  # fmt: skip
        with self._writing():
            self._write_json("index.json", index)
        (self.place / "state.json").unlink()

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        beside = self.place / f"{name}.part"
        with beside.open("w") as file:
            file.write(json.dumps(content))
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, self.place / name)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.place} cannot be written ({error.strerror}): make room and run again, it goes on "
                              f"after about {self.state.documents:,} documents") from error  # fmt: skip


Piece = tuple[Split, str, bool]  # whether the document ends here


def batches(documents: Iterator[tuple[Split, str]]) -> Iterator[list[Piece]]:
    """Pieces of some `BATCH` characters together. A long document is cut before spaces, so that memory is bounded."""
    batch: list[Piece] = []
    size = 0
    for split, text in documents:
        start, stop = 0, -1
        while stop < len(text):  # also for an empty document: each is counted
            stop = len(text)
            if stop - start > BATCH:
                stop = text.rfind(" ", start + 1, start + BATCH)
                stop = stop if stop > start else start + BATCH
            batch.append((split, text[start:stop], stop == len(text)))
            size, start = size + stop - start, stop
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def append(file: FileIO, data: bytes) -> None:
    """Writes all of `data`: an unbuffered file may take a part of it at a time."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


@contextmanager
def progress() -> Iterator[Callable[[State, int], None]]:
    """A bar on a terminal: documents, tokens, and bytes of text per second."""
    console = Console()
    console.quiet = not console.is_terminal
    bar = Progress(TextColumn("tokenising"), BarColumn(30), TextColumn("{task.fields[status]}"), TimeElapsedColumn(),
                   console=console, transient=True, refresh_per_second=2)  # fmt: skip
    task, began, done = bar.add_task("", total=None, status=""), time.monotonic(), 0

    def report(state: State, size: int) -> None:
        nonlocal done
        done += size
        tokens, rate = sum(state.tokens.values()) / 1e6, done / 1e6 / max(time.monotonic() - began, 1e-3)
        bar.update(task, status=f"{state.documents:,} documents, {tokens:,.1f} M tokens, {rate:.1f} MB/s")

    with bar:
        yield report
