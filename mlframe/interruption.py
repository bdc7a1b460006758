"""SIGTERM, SIGINT and SLURM's requeue signal: training ends after the step under way, which is saved."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

import lightning.pytorch as pl


class Interruption(pl.Callback):
    """Notes a signal while training runs. The loop looks at `signum` (0: none) at the end of each step.

    In place of Lightning's handlers, which stop before the step is saved or save in the middle of it. A second SIGINT
    ends at once, and loses what was not saved.
    """

    def __init__(self, requeue: int | None = None) -> None:
        self.signum, self.requeue = 0, requeue
        self._before: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in {signal.SIGTERM, signal.SIGINT, self.requeue or signal.SIGTERM}:
                self._before[signum] = signal.signal(signum, self._note)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == self.signum == signal.SIGINT:
            signal.default_int_handler(signum, frame)
        self.signum = signum
        again = "; once more to stop at once" if signum == signal.SIGINT else ""
        print(f"{signal.Signals(signum).name}: saving after this step{again}", file=sys.stderr, flush=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
