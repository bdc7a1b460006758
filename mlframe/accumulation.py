"""Checkpoints inside an accumulation window, where a step is half done, such as after a validation."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from mlframe.errors import ConfigError
from mlframe.sharding import local


class OpenWindow(pl.Callback):
    """Saves the gradients that an open window has summed up, which Lightning loses, and puts them back.

    They differ from process to process, so such a checkpoint goes on with as many processes as it was saved with.
    """

    def __init__(self) -> None:
        self._gradients: list[dict[str, Tensor]] = []

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.fit_loop.in_window:
            named = pl_module.named_parameters()
            checkpoint["open_window"] = _gather({name: local(p.grad).cpu() for name, p in named if p.grad is not None})

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._gradients = checkpoint.get("open_window", [])
        if self._gradients and len(self._gradients) != trainer.world_size:
            raise ConfigError(
                f"the checkpoint was saved inside an accumulation window by {len(self._gradients)} processes, and this "
                f"run has {trainer.world_size}: use as many, or go on from last.ckpt, which is saved between steps"
            )

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After Trainer has set all gradients to zero."""
        if not self._gradients:
            return
        mine, self._gradients = self._gradients[trainer.global_rank], []
        for name, parameter in pl_module.named_parameters():
            if name in mine:
                parameter.grad = torch.empty_like(parameter)
                local(parameter.grad).copy_(mine[name])


def _gather(mine: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each process has, in the memory of process 0."""
    if not dist.is_initialized():
        return [mine]
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    return everyone or []
