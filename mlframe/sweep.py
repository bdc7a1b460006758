"""A Hydra multirun: each job is a process of its own, status.csv says how each ended, a table at the end likewise.

A process of its own, as DDP starts its command again and leaves its environment behind, and as a job that is killed
must not take the sweep with it. Hydra's task only starts the job and waits. What the jobs of one command tell each
other (they may run in parallel) is in a journal, a file of lines, whose name is in the environment.
"""

from __future__ import annotations

import csv
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from mlframe import run_folder, status
from mlframe.errors import ConfigError
from mlframe.results import new_table, tested
from mlframe.status import Status

_JOURNAL = "MLFRAME_SWEEP"
_COLUMNS = ("job", "status", "reason", "step", "overrides")


class Begin(Callback):
    """Hydra's callback: a multirun begins. Its journal lies in its folder; a signal is noted there, for all jobs."""

    pid: int | None = None
    """Of the process that runs the command; the workers of a parallel launcher do not know it."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        # Not named by the process: those of two nodes or containers may have the same number.
        journal = folder / f".sweep-{secrets.token_hex(8)}.jsonl"
        journal.write_text("")
        Begin.pid = os.getpid()
        os.environ[_JOURNAL] = str(journal)
        os.environ["HYDRA_FULL_ERROR"] = "1"  # leaves an error to `command`, which makes it one line

        def note(number: int, frame: Any) -> None:
            if _signal(journal):
                raise KeyboardInterrupt  # asked again: at once
            _append(journal, {"signal": number})

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
                signal.signal(number, note)


def job(config: DictConfig) -> float | None:
    """Hydra's task in a multirun: run the job, note how it ended, return what a sweeper optimises (None: no value)."""
    hydra, journal = HydraConfig.get(), Path(os.environ[_JOURNAL])
    if not _is_main():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process has it too, and notes it
    folder = Path(config.run_dir)
    ended = _ended(config, folder, journal)
    name = os.path.relpath(hydra.runtime.output_dir, journal.parent)
    entry = {"number": hydra.job.num, "job": name, **asdict(ended), "overrides": hydra.job.override_dirname}
    _append(journal, {**entry, "folder": str(folder), "task": list(hydra.overrides.task)})
    _write_csv(journal)
    if _signal(journal) and _is_main():
        raise KeyboardInterrupt
    results = run_folder.read_results(folder) if ended.status == "finished" else None
    if results is None:
        return None
    if config.metric not in results:
        print(f"metric={config.metric} is not in results.json; there are {', '.join(results)}", file=sys.stderr)
        return None
    return float(results[config.metric])


def _ended(config: DictConfig, folder: Path, journal: Path) -> Status:
    """How the job ended, now or in an earlier sweep."""
    try:
        text = OmegaConf.to_yaml(config, resolve=True)
        if config.resume == "auto":
            run_folder.check_same(folder, config)
            if (results := run_folder.read_results(folder)) is not None:
                print(f"{folder} is finished")
                return Status("finished", step=results.get("steps"))
            if (before := status.of(folder)) is not None and before.status == "diverged":
                print(f"{folder} diverged before, and would again; to try anew, add resume=never")
                return before
    except (ConfigError, OmegaConfBaseException) as error:
        return status.caused(ConfigError(" ".join(str(error).split())))
    if _signal(journal):
        return Status("not started", "the sweep was stopped")
    if config.fail_fast and any(entry.get("status") == "failed" for entry in _entries(journal)):
        return Status("not started", "fail_fast=true, and a job failed")
    return _run(text, folder, journal)


def _run(text: str, folder: Path, journal: Path) -> Status:
    """Run the job, and wait for it. A signal to the sweep is passed on once: it saves, and ends."""
    before = status.of(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".job-", dir=folder) as beside:
        path = Path(beside) / "config.yaml"
        path.write_text(text)
        # In a process group of its own, or a signal to the group would come twice, which DDP does not bear.
        command = [sys.executable, "-m", "mlframe.job", str(path)]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        told = False
        try:
            while child.poll() is None:
                if _signal(journal) and not told:
                    child.terminate()
                    told = True
                with suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=0.5)
        finally:
            with suppress(ProcessLookupError):  # none is left; with DDP, one may be
                os.killpg(child.pid, signal.SIGKILL)
        if (ended := status.read(path.with_suffix(".json"))) is not None:
            return ended
    return _died(child.returncode, told, folder, before)


def _died(code: int, told: bool, folder: Path, before: Status | None) -> Status:
    """How a job ended that could not say so itself."""
    left = status.of(folder)
    if left is not None and left != before and left.status != "running":
        return left  # said before its last breath, or by another of its processes that broke
    if told and code == -signal.SIGTERM:
        ended = Status("stopped", "SIGTERM")
    elif code < 0:
        memory = "; out of memory?" if code == -signal.SIGKILL else ""
        ended = Status("failed", f"killed by signal {-code} ({signal.Signals(-code).name}){memory}")
    else:
        ended = Status("failed", f"exited with code {code}")
    with suppress(ConfigError), run_folder.held(folder):
        status.write(folder / "status.json", ended)
    return ended


def command(hydra_main: Callable[[], Any]) -> None:
    """Run Hydra's main. After a multirun print its table, and exit: 1 if a job failed, 128 + a signal that ended it."""
    failure = ""
    try:
        hydra_main()
    except KeyboardInterrupt:
        if _JOURNAL not in os.environ:
            raise
    except Exception as error:
        if _JOURNAL not in os.environ:
            raise
        failure = " ".join(str(error).split())
        if not isinstance(error, (HydraException, OmegaConfBaseException)):
            log = Path(os.environ[_JOURNAL]).with_name("error.log")
            log.write_text("".join(traceback.format_exception(error)))
            failure = f"the sweep broke: {type(error).__name__}: {failure} (the traceback is in {log})"
    if _JOURNAL not in os.environ:
        return
    journal = Path(os.environ.pop(_JOURNAL))
    rows, number = _rows(journal), _signal(journal)
    _report(journal.parent, rows)
    journal.unlink()
    if failure:
        print(f"mlframe-train: {failure}", file=sys.stderr)
    failed = bool(failure) or any(row["status"] == "failed" for row in rows)
    sys.exit(128 + number if number else int(failed))


def _report(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The table of the jobs; not cut or folded where it goes to a file."""
    results = [run_folder.read_results(Path(row["folder"])) if row["status"] == "finished" else None for row in rows]
    scores = [tested(result or {}) for result in results]
    names = list(dict.fromkeys(name for score in scores for name in score))
    shared = set.intersection(*(set(row["task"]) for row in rows)) if len(rows) > 1 else set()
    table = new_table()
    for name in ("job", "overrides"):  # a long name is cut, which may leave nothing to tell jobs apart by
        table.add_column(name, overflow="fold")
    for name in ("status", *names):
        table.add_column(name)
    table.add_column("reason", overflow="fold")
    for row, score in zip(rows, scores, strict=True):
        own = " ".join(override for override in row["task"] if override not in shared)
        values = [f"{score[name]:.4f}" if name in score else "" for name in names]
        table.add_row(row["job"], own, row["status"], *values, row["reason"])
    width = None if sys.stdout.isatty() else 10_000
    Console(highlight=False, markup=False, width=width).print(table)
    print(f"{len(rows)} jobs, in {folder / 'status.csv'}", flush=True)


def _write_csv(journal: Path) -> None:
    """status.csv with the rows of this command's jobs in their order, after those of other commands in the folder."""
    path = journal.with_name("status.csv")
    with FileLock(journal.with_name(".status.lock")):
        rows = _rows(journal)
        ours = {row["job"] for row in rows}
        others: list[dict[str, Any]] = []
        if path.exists():
            with path.open(newline="") as file:
                others = [row for row in csv.DictReader(file) if row["job"] not in ours]
        beside = path.with_name(".status.csv.part")
        with beside.open("w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS, extrasaction="ignore")
            writer.writeheader()
            writer.writerows([*others, *rows])
        os.replace(beside, path)


def _rows(journal: Path) -> list[dict[str, Any]]:
    """One a job, in the order of the command; a sweeper may try the same job twice."""
    entries = sorted((entry for entry in _entries(journal) if "job" in entry), key=lambda entry: entry["number"])
    return list({entry["job"]: entry for entry in entries}.values())


def _entries(journal: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in journal.read_text().splitlines()]


def _signal(journal: Path) -> int:
    """The signal that ends this sweep, or 0."""
    return next((entry["signal"] for entry in _entries(journal) if "signal" in entry), 0)


def _append(journal: Path, entry: dict[str, Any]) -> None:
    with journal.open("a") as file:  # one short write at the file's end: whole, whoever else writes
        file.write(json.dumps(entry) + "\n")


def _is_main() -> bool:
    return Begin.pid == os.getpid()
