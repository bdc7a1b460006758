"""The moments at which tests/kills.py kills a run: calls of the run's own code, and of what it writes files with."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from mlframe import loop, transition
from mlframe.checkpoint import LastCheckpoint
from mlframe.ledger import Ledger
from mlframe.rows import Rows


@dataclass(frozen=True)
class Moment:
    """`when` ("before", "after", or "within" a write of a file) a call of `owner.name`; of os.replace, one whose target
    matches `target`."""

    when: str
    owner: Any
    name: str
    target: str = ""

    def watch(self, reached: Callable[[], None], share: float = 0.5) -> None:
        """Call `reached` each time that the moment comes in this process; `share` of a file are written by then."""
        call = getattr(self.owner, self.name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            here = not self.target or Path(args[1]).match(self.target)
            if here and self.when == "before":
                reached()
            done = call(*args, **kwargs)
            if here and self.when == "after":
                reached()
            return done

        def torn(content: Any, file: Any) -> None:
            whole = io.BytesIO()
            call(content, whole)
            cut = int(share * whole.tell())
            file.write(whole.getvalue()[:cut])
            file.flush()
            reached()
            file.write(whole.getvalue()[cut:])

        setattr(self.owner, self.name, torn if self.when == "within" else watched)


START = {
    "config.yaml is there": Moment("after", os, "replace", "config.yaml"),
    "plan.json is not there": Moment("before", os, "replace", "plan.json"),
    "all is built": Moment("before", pl.Trainer, "fit"),
}
LATER = {
    "before the optimizer steps": Moment("before", pl.LightningModule, "optimizer_step"),
    "a batch is done": Moment("after", Ledger, "on_train_batch_end"),
    "in a validation": Moment("before", pl.LightningModule, "on_validation_batch_end"),
    "a row is due": Moment("before", Rows, "log_metrics"),
    "a row is there": Moment("after", Rows, "log_metrics"),
    "metrics.csv is rewritten": Moment("before", os, "replace", "metrics.csv"),
    "rows are there, no checkpoint": Moment("before", LastCheckpoint, "on_step_done"),
    "a checkpoint is torn": Moment("within", torch, "save"),
    "a checkpoint is in memory": Moment("before", os, "fsync"),
    "last.ckpt is written": Moment("before", os, "replace", "last.ckpt"),
    "last.ckpt is replaced": Moment("after", os, "replace", "last.ckpt"),
    "best.ckpt is written": Moment("before", os, "replace", "best.ckpt"),
    "best.ckpt is replaced": Moment("after", os, "replace", "best.ckpt"),
    "a transition begins": Moment("before", transition, "weights_of"),
    "coalesce": Moment("before", transition, "merging"),
    "decoalesce": Moment("before", transition, "splitting"),
    "interpolate": Moment("before", transition, "interpolate"),
    "the next weights are there": Moment("after", transition, "load"),
    "the next network is there": Moment("after", loop, "_call_configure_model"),
    "levels/k is written": Moment("before", os, "replace", "levels/?"),
    "final/ is written": Moment("before", os, "replace", "final"),
    "final/ is there": Moment("after", os, "replace", "final"),
    "the last validation is done": Moment("after", pl.Trainer, "validate"),
    "results.json is written": Moment("before", os, "replace", "results.json"),
    "results.json is there": Moment("after", os, "replace", "results.json"),
}
MOMENTS = {**START, **LATER}
