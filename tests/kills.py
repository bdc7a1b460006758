"""Runs that are killed again and again, and go on: tests/test_kills.py does it a little, benchmarks/chaos.py a lot.

A run is the real one, a composed configuration given to `train`, in a process of its own that SIGKILL ends: from inside
at one of tests/moments.py, or from outside at any time. The next process goes on in the same folder until the run is
finished. Then the folder has to be that of a run that nothing killed, to the bit. As the imports take seconds, the
processes are forked from a server that has done them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from moments import LATER, MOMENTS, START
from omegaconf import DictConfig
from same_run import differences
from small_runs import config_of, write_source

from mlframe.rows import read_rows
from mlframe.train import train

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["mlframe.train", "mlframe.data.image", "mlframe.data.text", "mlframe.language"])
ANY_TIME, PART_FILE = "at any time", "a part file grows"
"""From outside: a time by the clock, and from then on the first sight of a checkpoint that is being written."""
HANGS = 120.0
"""Seconds after which a process of a run of seconds is given up."""


@dataclass(frozen=True)
class Kill:
    """A moment at its `nth` time; `share` of a file are written by then, or of the run's usual time have passed."""

    moment: str
    nth: int = 1
    share: float = 0.5


@dataclass
class Death:
    """A kill that met its run: phase and step of the last row, and the seconds from the fork to a first new row."""

    family: str
    way: str
    run: str
    moment: str
    phase: str
    step: str
    first_row: float | None
    lost: str = ""


def draw_kills(counts: Counter[str], number: int, seed: int) -> deque[Kill]:
    """Every moment that a run with these `counts` comes by, the rest from outside, in random order. Those of the start
    come twice in a row: between the two nothing is done."""
    draw = random.Random(seed)
    groups = [[name] * 2 for name in START] + [[name] for name in LATER if counts[name]]
    outside = number - sum(map(len, groups))
    groups += [[(ANY_TIME, PART_FILE)[i % 2]] for i in range(outside)]
    draw.shuffle(groups)
    names = [name for group in groups for name in group][:number]
    # In the first half of its times, so that a run meets several.
    return deque(Kill(name, draw.randint(1, max(1, counts[name] // 2)), draw.random()) for name in names)


class Case:
    """A family trained in one way: `folder`/whole is the run that nothing kills, beside it come the others.

    prepare: called first in each process of a run; breaks what a test wants broken.
    """

    def __init__(self, family: str, way: str, folder: Path, prepare: Callable[[], None] | None = None) -> None:
        self.family, self.way, self.folder, self.prepare = family, way, folder, prepare
        self.source, self.whole = write_source(family, folder / "source"), folder / "whole"
        if error := live(self._config(self.whole), None, prepare).error:
            raise RuntimeError(f"{family}, {way}: a run that nothing kills does not end well: {error}")
        seen = json.loads(_seen(self.whole).read_text())
        self.counts, self.seconds = Counter(seen["counts"]), seen["seconds"]

    def endure(self, name: str, kills: deque[Kill]) -> list[Death]:
        """One run to its end, through the kills at the queue's front; one that comes too late is put back, sooner."""
        run, deaths = self.folder / name, list[Death]()
        config = self._config(run)
        while (life := live(config, kill := kills.popleft() if kills else None, self.prepare, self.seconds)).killed:
            assert kill is not None
            last = (read_rows(run / "metrics.csv") or [{}])[-1]
            place = last.get("phase", ""), last.get("step", "")
            deaths.append(Death(self.family, self.way, name, kill.moment, *place, life.first_row))
        if kill is not None:
            kills.append(replace(kill, nth=1, share=kill.share / 2))
        for death in deaths:  # which of them did it, cannot be told
            death.lost = life.error or "; ".join(differences(self.whole, run))
        return deaths

    def _config(self, run: Path) -> DictConfig:
        return config_of(self.family, self.way, self.source, run)


@dataclass
class Life:
    """How a process of a run ended, and the seconds from its start to its first row."""

    killed: bool = False
    error: str = ""
    first_row: float | None = None


def live(config: DictConfig, kill: Kill | None, prepare: Callable[[], None] | None, seconds: float = HANGS) -> Life:
    """One process of a run of so many `seconds`, until it is killed, ends or hangs."""
    run, life = Path(config.run_dir), Life()
    rows, part = run / "metrics.csv", run / "checkpoints" / ".last.ckpt.part"
    old_rows, old_part = _state(rows), _state(part)
    process, begun = SERVER.Process(target=_train, args=(config, kill, prepare)), time.monotonic()
    process.start()
    assert process.pid is not None
    while process.is_alive():
        process.join(0.001)
        passed = time.monotonic() - begun
        if life.first_row is None and _state(rows) != old_rows:
            life.first_row = passed
        due = kill is not None and kill.moment not in MOMENTS and passed > kill.share * seconds
        if passed > HANGS:
            life.error = f"hangs for {HANGS:.0f} s"
        elif not due or (kill.moment == PART_FILE and _state(part) in (old_part, None)):
            continue
        _kill(process.pid)
        process.join()
    life.killed = kill is not None and process.exitcode == -signal.SIGKILL and not life.error
    if process.exitcode and not life.killed and not life.error:
        lines = _log(run).read_text().splitlines() or ["(it printed nothing)"]
        life.error = f"exit code {process.exitcode}: {lines[-1]}"
    return life


def _train(config: DictConfig, kill: Kill | None, prepare: Callable[[], None] | None) -> None:
    """In the forked process: the run, killing itself where `kill` says so."""
    os.setpgid(0, 0)  # so that a kill reaches its loading processes too,
    multiprocessing.set_start_method("fork", force=True)  # which come from it and not from our server
    begun, run = time.monotonic(), Path(config.run_dir)
    log = os.open(_log(run), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    counts = Counter[str]()

    def reached(moment: str) -> None:
        counts[moment] += 1
        if kill is not None and counts[moment] == kill.nth:
            os.killpg(0, signal.SIGKILL)

    for name, moment in MOMENTS.items():
        if kill is None or name == kill.moment:
            moment.watch(lambda name=name: reached(name), 0.5 if kill is None else kill.share)
    train(config)
    _seen(run).write_text(json.dumps({"counts": counts, "seconds": time.monotonic() - begun}))


def _log(run: Path) -> Path:
    """What the run's last process printed; beside the folder, which has to be the run's own."""
    return run.with_suffix(".log")


def _seen(run: Path) -> Path:
    return run.with_suffix(".json")


def _state(path: Path) -> tuple[int, int] | None:
    with suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_mtime_ns, stat.st_size
    return None


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):  # it has just ended
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet, and so no loading processes
            os.kill(pid, signal.SIGKILL)
