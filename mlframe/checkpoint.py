"""Checkpoints that a kill cannot break."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, so that the old file is whole until the new one is.

    Lightning's own goes through the system's temporary folder; a rename from there to another disk is a copy.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.part")
        with beside.open("wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)


class LastCheckpoint(Checkpoint):
    """Keeps `folder`/last.ckpt: every `every` optimizer steps, and at the step at which training is told to stop.

    Only ever between two optimizer steps, where nothing is half accumulated; and inside the epoch, as what is saved
    after a fit counts the epoch as over.
    """

    def __init__(self, folder: str | Path, every: int) -> None:
        self.path, self.every = Path(folder) / "last.ckpt", every
        self._step = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        step, before = trainer.global_step, self._step
        self._step = step
        if step != before and (step % self.every == 0 or trainer.should_stop):
            trainer.save_checkpoint(self.path)
