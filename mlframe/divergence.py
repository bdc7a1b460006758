"""A run whose loss is no longer finite stops, and leaves no such state behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from mlframe.errors import Diverged
from mlframe.module import LevelModule
from mlframe.sharding import local

_KINDS = ("finite", "inf", "nan")


class Divergence(pl.Callback):
    """Raises Diverged, on all processes, where the training loss of any micro-batch or `val/loss` is not finite.

    Losses stay on their device, so that no step waits for it. They are looked at every `log_every_n_steps` steps, after
    a validation, at the end of a phase and of training, and with the weights before any checkpoint is saved: a last
    step may break weights whose loss was still finite. Stands before the callbacks that save.
    """

    def __init__(self) -> None:
        self._place = (0, "the start")
        self._losses: list[tuple[tuple[int, str], Tensor]] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LevelModule)
        step, rate, plan = trainer.global_step + 1, trainer.optimizers[0].param_groups[0]["lr"], pl_module.plan
        phase = f"phase {pl_module.phase_index + 1}/{len(plan.phases)} {pl_module.phase.name}"
        self._place = step, f"step {step:,} of {plan.steps:,} ({phase}, learning rate {rate:.3g})"

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs is not None:
            self._losses.append((self._place, outputs["loss"].reshape(())))

    def on_step_done(self, trainer: pl.Trainer) -> None:
        every = trainer.log_every_n_steps
        if every and trainer.global_step % every == 0:
            self._look(trainer)

    def on_phase_end(self, trainer: pl.Trainer, module: LevelModule) -> None:
        self._look(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._look(trainer)
        loss = trainer.callback_metrics.get("val/loss")
        if loss is not None and not trainer.sanity_checking:
            self._refuse(trainer, "val/loss", [self._place], [loss])

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._look(trainer)
        parts = [local(parameter.detach()) for parameter in pl_module.parameters()]
        # Of a sharded weight a process may hold nothing.
        largest = [(part.abs().max() if part.numel() else part.new_zeros(())).float() for part in parts]
        self._refuse(trainer, "a weight", [self._place] * len(parts), largest)

    def _look(self, trainer: pl.Trainer) -> None:
        if self._losses:
            places, losses = zip(*self._losses, strict=True)
            self._losses = []
            self._refuse(trainer, "train/loss", places, losses)

    def _refuse(
        self, trainer: pl.Trainer, name: str, places: Sequence[tuple[int, str]], values: Sequence[Tensor]
    ) -> None:
        """Of the values of all processes, the first that is not finite. Every process comes here equally often."""
        stacked = torch.stack(list(values))
        kinds = stacked.isnan().int() * 2 + stacked.isinf().int()
        kinds = trainer.strategy.reduce(kinds, reduce_op="max")
        for (step, place), kind in zip(places, kinds.tolist(), strict=True):
            if kind:
                raise Diverged(f"diverged: {name} is {_KINDS[kind]} at {place}", step)
