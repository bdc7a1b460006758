"""SIGTERM, SIGINT, SIGHUP and SLURM's requeue signal: training ends after the step under way, which is saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any, Self

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from mlframe.errors import Interrupted


class Interruption(pl.Callback):
    """Notes a signal as `signum` (0: none). The loop looks at it at the end of each step; outside training it ends the
    sanity check and the last evaluations between two batches, and, as a context, all that comes before a fit at once.

    Several processes agree each time: one may have got a signal that the others have not. In place of Lightning's
    handlers, which stop before the step is saved or save in the middle of it. A second SIGINT ends at once, and loses
    what was not saved.
    """

    def __init__(self) -> None:
        self.signum = 0
        self.requeue: int | None = None
        self._before: dict[int, Any] = {}
        self._entered = self._at_once = False
        self._pid, self._received = os.getpid(), 0

    def __enter__(self) -> Self:
        self._entered = self._at_once = True
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._entered = False
        self.restore()

    def install(self) -> None:
        """Take the signals; but not those that nohup, or a shell's &, has told this process to ignore."""
        if threading.current_thread() is threading.main_thread():
            for signum in {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, self.requeue or signal.SIGTERM}:
                if signum not in self._before and signal.getsignal(signum) != signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._note)

    def restore(self) -> None:
        if self._entered:  # for all of it
            return
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._at_once = False  # the processes are connected

    def agreed(self, trainer: pl.Trainer) -> int:
        """The signal that some process has got, or 0. All of them must ask."""
        if trainer.world_size > 1:
            flag = torch.tensor(self.signum, device=trainer.strategy.root_device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self.signum = int(flag)
        return self.signum

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.sanity_checking or trainer.validating:
            self._end(trainer)

    def on_test_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._end(trainer)

    def _end(self, trainer: pl.Trainer) -> None:
        if signum := self.agreed(trainer):
            raise Interrupted(signum)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._at_once and os.getpid() == self._pid and rank_zero_only.rank == 0:
            raise Interrupted(signum)
        if self._at_once:  # a child, or a process that the first waits for
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        if os.getpid() != self._pid:  # a loader's worker, which the step under way still needs
            return
        if signum == self._received == signal.SIGINT:
            signal.default_int_handler(signum, frame)
        self.signum = self._received = signum
        again = "; once more to stop at once" if signum == signal.SIGINT else ""
        print(f"{signal.Signals(signum).name}: stopping once the step is saved{again}", file=sys.stderr, flush=True)


def end_with_parent() -> None:
    """Let this process, if it is not a run's first one, end when the one that started it is gone: it would wait for
    the others, and then write over the status of the run that came after."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    if rank_zero_only.rank:
        threading.Thread(target=watch, daemon=True).start()
