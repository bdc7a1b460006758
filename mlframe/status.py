"""How a run stands and how it ended: status.json in its folder, and the one line and exit code of its command."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig
from torch.distributed import DistBackendError

from mlframe import run_folder
from mlframe.errors import ConfigError, Diverged, Interrupted
from mlframe.interruption import end_with_parent


@dataclass(frozen=True)
class Status:
    """status: running, finished, failed, diverged or stopped (by a signal or out of time: it can go on).

    reason: one line, or empty. step: the optimizer steps done, or the one that diverged; None where none began.
    """

    status: str
    reason: str = ""
    step: int | None = None


def read(path: Path) -> Status | None:
    """None where there is none, or no whole one: a full disk leaves such files, and so does a power cut."""
    try:
        return Status(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write(path: Path, status: Status) -> None:
    run_folder.write(path, json.dumps(asdict(status)))


def of(folder: Path) -> Status | None:
    """How the run of a folder stands, or None where there is none."""
    return read(folder / "status.json")


def caused(error: BaseException, step: int | None = None) -> Status:
    """How a run ends that `error` ends."""
    if isinstance(error, Diverged):
        return Status("diverged", str(error), error.step)
    if isinstance(error, Interrupted):
        return Status("stopped", str(error), step)
    # Lightning turns a KeyboardInterrupt into an exit.
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return Status("stopped", "SIGINT", step)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if any(line.startswith("Traceback (most recent") for line in lines):
        lines = lines[-1:]  # a loader's worker sends its traceback before the message
    reason = " ".join(" ".join(lines).split())
    if "gloo/transport" in reason or isinstance(error, DistBackendError):
        reason = f"another process of this run is gone, killed or out of memory ({reason[:150]})"
    return Status("failed", reason if isinstance(error, ConfigError) else f"{type(error).__name__}: {reason}", step)


def exit_code(ended: Status) -> int:
    """Of the command. Lightning's first process kills itself where another fails: what all share, it alone reports."""
    if not first_process() and ended.status in ("stopped", "diverged"):
        return 0
    if ended.status == "stopped":
        return 128 + signal.Signals[ended.reason] if ended.reason in signal.Signals.__members__ else 0
    return 0 if ended.status == "finished" else 1


class Record:
    """What `recorded` gives to its body, which sets `trainer` once there is one."""

    trainer: pl.Trainer | None = None

    @property
    def step(self) -> int | None:
        return self.trainer.global_step if self.trainer is not None else None


@contextmanager
def recorded(config: DictConfig) -> Iterator[Record]:
    """Hold the folder of the run that the body trains, and keep its status.json and error.log.

    Nothing is left of a folder that was not there before and in which no run began.
    """
    folder, record = Path(config.run_dir), Record()
    if config.trainer.fast_dev_run:
        yield record
        return
    fresh, path = not folder.exists(), folder / "status.json"
    with run_folder.held(folder) if first_process() else nullcontext():
        if first_process():
            write(path, Status("running"))
            (folder / "error.log").unlink(missing_ok=True)
        try:
            yield record
        except BaseException as error:
            with suppress(OSError):  # a full disk must not hide what it has ended
                _record_end(folder, caused(error, record.step), error)
            if fresh and first_process() and not (folder / "config.yaml").exists():
                _remove(folder)
            raise
        if first_process():
            done = run_folder.read_results(folder) is not None
            write(path, Status("finished" if done else "stopped", "" if done else "before its last step", record.step))


def _record_end(folder: Path, ended: Status, error: BaseException) -> None:
    """The first process that breaks says why: the others only lose their connection to it."""
    unexpected = ended.status == "failed" and not isinstance(error, ConfigError)
    before = of(folder)
    if unexpected:
        with (folder / "error.log").open("a") as file:
            print(f"process {rank_zero_only.rank}:", *traceback.format_exception(error), sep="\n", file=file)
    if first_process() and not (unexpected and before is not None and before.status == "failed"):
        write(folder / "status.json", ended)
    elif ended.status == "failed" and before is not None and before.status == "running":
        other = Status("failed", f"process {rank_zero_only.rank}: {ended.reason}", ended.step)
        write(folder / "status.json", other)


def _remove(folder: Path) -> None:
    for name in ("status.json", "error.log", ".lock.by", ".lock"):
        (folder / name).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def first_process() -> bool:
    return rank_zero_only.rank == 0 and os.environ.get("NODE_RANK", "0") == "0"


def attempt(train: Callable[[DictConfig], dict[str, Any]], config: DictConfig) -> Status:
    """Train, and say in one line what ended it, if that is not success. Returns how it ended."""
    folder, unexpected = Path(config.run_dir), False
    end_with_parent()
    try:
        results = train(config)
        ended = Status("finished" if results or config.trainer.fast_dev_run else "stopped")
    except BaseException as error:
        logging.getLogger("mlframe").debug("", exc_info=True)
        ended = caused(error)
        unexpected = ended.status == "failed" and not isinstance(error, ConfigError)
        logged = unexpected and (folder / "error.log").exists()
        if unexpected and not logged:
            traceback.print_exc()  # fast_dev_run writes nothing
        more = f" (the traceback is in {folder / 'error.log'})" if logged else ""
        if ended.status == "stopped" and first_process():
            print(f"Stopped by {ended.reason}; the same command goes on from the last checkpoint", flush=True)
        elif ended.status == "failed" or first_process():
            print(f"mlframe-train: {ended.reason}{more}", file=sys.stderr, flush=True)
    kept = of(folder)
    if kept is not None and kept.status == ended.status and (unexpected or ended.reason in ("", kept.reason)):
        return kept  # which knows the step, and which process broke first
    return ended
