"""The progress bar: where in the cycle training is, how good, and what it has cost."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mlframe.ledger import Ledger
from mlframe.module import LevelModule


class CycleProgress(ProgressBar):
    """A rich bar per phase: level, steps, loss, FLOPs. A line for each phase and each validation stays, so that a run
    whose output goes to a file tells the same story.

    refresh: training batches between two updates of the bar.
    """

    def __init__(self, refresh: int = 10) -> None:
        super().__init__()
        self.refresh = refresh
        self._console = Console()
        self._bars: Progress | None = None
        self._ledger = Ledger()

    def disable(self) -> None:
        self._console = Console(quiet=True)

    def enable(self) -> None:
        self._console = Console()

    def print(self, *args: Any, **kwargs: Any) -> None:
        self._console.print(*args, highlight=False, soft_wrap=True, **kwargs)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LevelModule)
        if not trainer.is_global_zero:
            self.disable()
        self._ledger = next(c for c in trainer.callbacks if isinstance(c, Ledger))
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(30), TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            TimeElapsedColumn(), TextColumn("<"), TimeRemainingColumn(), TextColumn("{task.fields[status]}"),
            console=self._console, transient=True, refresh_per_second=2,  # drawing takes time from training
        )  # fmt: skip
        self._bars.start()
        self.on_phase_start(trainer, pl_module)

    def on_phase_start(self, trainer: pl.Trainer, module: LevelModule) -> None:
        if self._bars is None:
            return
        for task in self._bars.task_ids:
            self._bars.remove_task(task)
        phase, level = module.phase, module.level
        done = trainer.global_step - module.plan.start(module.phase_index)
        title = f"phase {module.phase_index + 1}/{len(module.plan.phases)} {phase.name} (level {level.index})"
        self._bars.add_task(title, total=phase.steps, completed=done, status="")
        sizes = "{layers} layers, {heads} heads, width {width}".format(**level.shape)
        self.print(f"{title}: {phase.steps:,} steps, {sizes}, {level.parameters:,} parameters")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LevelModule)
        done = trainer.global_step - pl_module.plan.start(pl_module.phase_index)
        if self._bars is None or (batch_idx % self.refresh and done < pl_module.phase.steps):
            return
        loss = outputs["loss"] * trainer.accumulate_grad_batches
        status = f"loss {float(loss):.3f}  {self._ledger.total_flops:.3g} FLOPs"
        self._bars.update(self._bars.task_ids[-1], completed=done, status=status)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or self._bars is None:
            return
        values = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("val/")}
        shown = "  ".join(f"{k} {v:.4f}" for k, v in sorted(values.items()))
        self.print(
            f"  step {trainer.global_step:,}  {shown}  {self._ledger.total_flops:.3g} FLOPs  "
            f"{self._ledger.wall_time:.0f} s"
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
