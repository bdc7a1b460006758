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

from mlframe.errors import ConfigError
from mlframe.module import LevelModule
from mlframe.sharding import FSDP2, whole_state


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames, so that the old file is whole until the new one is.

    Lightning's own goes through the system's temporary folder; a rename from there to another disk is a copy.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.part")
        try:
            with beside.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError where its writer could not write
            beside.unlink(missing_ok=True)
            old = f"the checkpoint of before is whole: {path}" if path.exists() else "there was none before"
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"cannot write a checkpoint ({reason}); {old}. Make room, and the same command goes on"
            ) from error
        os.replace(beside, path)


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
        stops = trainer.should_stop or step >= trainer.max_steps
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
        if upwards and not trainer.fast_dev_run:
            save_network(trainer, module, self.folder / str(module.level.index))


def save_network(trainer: pl.Trainer, module: LevelModule, folder: Path) -> None:
    """The current network in the form of its own library, with what the data says of itself (a tokenizer, classes).

    Every process must call it. A sharded network is gathered, whole, in the memory of process 0.
    """
    network = module.network
    assert network is not None
    if isinstance(trainer.strategy, FSDP2):
        whole = whole_state(network.state_dict())
        if trainer.is_global_zero:
            network = module.level.build()
            network.load_state_dict(whole)
    if not trainer.is_global_zero:
        return
    about = trainer.datamodule.about() if trainer.datamodule is not None else {}
    beside = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    module.level.architecture.save(network, module.level.config, beside, about)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)
