"""The ledger: what training has cost so far, written beside every metric that any logger gets."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl

from mlframe.module import LevelModule


@dataclass
class LevelCost:
    """What training one level has cost: samples, FLOPs, and seconds with the validations that fell in them."""

    samples: int = 0
    flops: int = 0
    seconds: float = 0.0


class Ledger(pl.Callback):
    """Counts FLOPs (over all processes and accumulated micro-batches), samples and seconds of training.

    Every row that a logger of the trainer gets carries `total_flops`, `images` or `tokens`, `wall_time` in seconds,
    `level`, `phase` and `parameters`. FLOPs are Python integers, so they are exact. They never fall: the counts are
    part of the checkpoint. Evaluation and the operators are not training steps: their time counts, they have no FLOPs.
    """

    def __init__(self) -> None:
        self.by_level: dict[int, LevelCost] = {}
        self._since: float | None = None

    @property
    def samples(self) -> int:
        return sum(cost.samples for cost in self.by_level.values())

    @property
    def total_flops(self) -> int:
        return sum(cost.flops for cost in self.by_level.values())

    @property
    def wall_time(self) -> float:
        """Seconds since the start of the fit, and of the fits that it goes on from."""
        running = time.monotonic() - self._since if self._since is not None else 0.0
        return sum(cost.seconds for cost in self.by_level.values()) + running

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        assert isinstance(pl_module, LevelModule)
        for logger in trainer.loggers:
            self._attach(logger, pl_module)

    def _attach(self, logger: Any, module: LevelModule) -> None:
        """Whatever the logger's class: the costs join each row on its way in."""
        log = getattr(logger.log_metrics, "unwrapped", logger.log_metrics)

        def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
            log({**metrics, **self.row(module)}, step)

        log_metrics.unwrapped = log  # type: ignore[attr-defined]
        logger.log_metrics = log_metrics

    def row(self, module: LevelModule) -> dict[str, float]:
        return {
            "total_flops": self.total_flops,
            module.unit: self.samples * module.units,
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
        self._spend(pl_module, pl_module.amount(batch) * trainer.world_size)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, LevelModule)
        self._spend(pl_module, 0)
        self._since = None

    def _spend(self, module: LevelModule, samples: int) -> None:
        cost, now = self.by_level.setdefault(module.level.index, LevelCost()), time.monotonic()
        cost.samples += samples
        cost.flops += samples * module.level.flops
        cost.seconds += now - (self._since or now)
        self._since = now

    def state_dict(self) -> dict[Any, Any]:
        return {level: asdict(cost) for level, cost in self.by_level.items()}

    def load_state_dict(self, state_dict: dict[Any, Any]) -> None:
        self.by_level = {level: LevelCost(**cost) for level, cost in state_dict.items()}
