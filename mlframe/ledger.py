"""The ledger: what training has cost so far, written beside every metric that any logger gets."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl

from mlframe.module import LevelModule


class Ledger(pl.Callback):
    """Counts FLOPs (over all processes and accumulated micro-batches), samples and seconds of training.

    Every row that a logger of the trainer gets carries `total_flops`, the samples (`images`), `wall_time` in seconds,
    `level`, `phase` and `parameters`. FLOPs are Python integers, so they are exact. They never fall: the counts are
    part of the checkpoint. Evaluation and the operators are not training steps: their time counts, they have no FLOPs.
    """

    def __init__(self) -> None:
        self.total_flops = 0
        self.samples = 0
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def wall_time(self) -> float:
        return self._seconds + (time.monotonic() - self._since if self._since is not None else 0.0)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, LevelModule)
        for logger in trainer.loggers:
            self._attach(logger, pl_module)

    def _attach(self, logger: Any, module: LevelModule) -> None:
        """Whatever the logger's class: the costs join each row on its way in."""
        if getattr(logger.log_metrics, "ledger", None) is self:
            return
        log = logger.log_metrics

        def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
            log({**metrics, **self.row(module)}, step)

        log_metrics.ledger = self  # type: ignore[attr-defined]
        logger.log_metrics = log_metrics

    def row(self, module: LevelModule) -> dict[str, float]:
        return {
            "total_flops": self.total_flops,
            module.unit: self.samples,
            "wall_time": round(self.wall_time, 3),
            "level": module.level.index,
            "phase": module.phase_index,
            "parameters": module.level.parameters,
        }

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._since = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LevelModule)
        samples = pl_module.amount(batch) * trainer.world_size
        self.samples += samples
        self.total_flops += samples * pl_module.level.flops

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._seconds, self._since = self.wall_time, None

    def state_dict(self) -> dict[str, Any]:
        return {"total_flops": self.total_flops, "samples": self.samples, "seconds": self.wall_time}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total_flops, self.samples = state_dict["total_flops"], state_dict["samples"]
        self._seconds = state_dict["seconds"]
