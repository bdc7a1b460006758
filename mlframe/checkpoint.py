"""Checkpoints that a kill cannot break."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from mlframe.module import LevelModule


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


def peek(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, without its tensors: those of a file are mapped and not read."""
    file = path / "meta.pt" if path.is_dir() else path
    peeked: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return peeked


class LastCheckpoint(Checkpoint):
    """Keeps `folder`/last.ckpt: every `every` optimizer steps, when training is told to stop, and at the end.

    Saved once a step is wholly done, its rows written and its validation too, and before the next batch is fetched.
    Never inside an accumulation window, where half a step would be lost.
    """

    def __init__(self, folder: str | Path, every: int) -> None:
        if every < 1:
            raise ValueError(f"every={every}: a checkpoint every so many optimizer steps, 1 or more")
        self.path, self.every = Path(folder) / "last.ckpt", every
        self._step = 0

    def on_step_done(self, trainer: pl.Trainer) -> None:
        step, before = trainer.global_step, self._step
        self._step = step
        stops = trainer.should_stop or trainer.received_sigterm or step >= trainer.max_steps
        if trainer.fast_dev_run:
            return
        if step != before and (step % self.every == 0 or stops):
            trainer.save_checkpoint(self.path)


class SaveLevels(pl.Callback):
    """Saves each smaller level's network as it is left for the larger one: `folder`/1, `folder`/2, ..."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def on_phase_end(self, trainer: pl.Trainer, module: LevelModule) -> None:
        upwards = module.plan.phases[module.phase_index + 1].level < module.level.index
        if upwards and trainer.is_global_zero and not trainer.fast_dev_run:
            save_network(trainer, module, self.folder / str(module.level.index))


def save_network(trainer: pl.Trainer, module: LevelModule, folder: Path) -> None:
    """The current network in the form of its own library, with what the data says of itself (a tokenizer, classes)."""
    assert module.network is not None
    about = trainer.datamodule.about() if trainer.datamodule is not None else {}
    beside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    module.level.architecture.save(module.network, module.level.config, beside, about)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)
