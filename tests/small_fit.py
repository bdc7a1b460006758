"""A fit of seconds that notes what it sees: three tiny levels, on images whose first pixel is their index."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from conftest import TINY
from torch.utils.data import DataLoader, Dataset

from mlframe.architectures import VIT
from mlframe.data.loader import Key, ResumableLoader, ResumableSampler
from mlframe.ledger import Ledger
from mlframe.levels import make_levels
from mlframe.loop import VCycleLoop
from mlframe.module import ImageClassification
from mlframe.plan import Plan, vcycle
from mlframe.schedule import Schedule

LEVELS = make_levels(VIT, {**TINY, "drop_path_rate": 0.1, "proj_drop_rate": 0.1}, count=3)
PLAN = vcycle(LEVELS, 26, e_a=[5, 4], e_small=[3, 6], alpha=[0.25, 0.5])  # levels 0 1 2 1 0: 5 4 6 3 8 steps
QUIET = replace(PLAN, levels=make_levels(VIT, TINY, count=3))  # without noise that depends on the process
TWO = LEVELS[:2]
SCHEDULE = Schedule("cosine", "phase", warmup=2, levels=[1.0, 2.0, 4.0])


class Indexed(Dataset):
    """Image i holds its index in the first pixel, noise in the others."""

    def __init__(self, size: int) -> None:
        self.images = torch.randn(size, 1, 16, 16, generator=torch.Generator().manual_seed(3))
        self.images[:, 0, 0, 0] = torch.arange(size)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: Key | int) -> tuple[torch.Tensor, int]:
        index = key if isinstance(key, int) else key[0]
        return self.images[index], index % 5


class Recorder(ImageClassification):
    """Notes what each micro-batch saw: (global step, phase, rate, indices)."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[tuple[int, int, float, list[int]]] = []
        self.fresh: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((self.trainer.global_step, self.phase_index, rate, batch[0][:, 0, 0, 0].int().tolist()))
        return super().training_step(batch, batch_idx)

    def on_phase_start(self) -> None:
        self.fresh.append(not self.trainer.optimizers[0].state)


class Told(pl.Callback):
    def on_phase_start(self, trainer: pl.Trainer, module: Recorder) -> None:
        module.on_phase_start()


class SaveAtValidation(pl.Callback):
    """A checkpoint after each validation, also inside an accumulation window: `folder`/BATCH.ckpt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.total_batch_idx:03}.ckpt")


def loader(size: int = 48, batch: int = 4, workers: int = 0, rank: int = 0, world: int = 1) -> ResumableLoader:
    sampler = ResumableSampler(size, batch, seed=7, rank=rank, world=world)
    return ResumableLoader(Indexed(size), sampler, num_workers=workers)


def fit(
    plan: Plan = PLAN,
    train: ResumableLoader | None = None,
    ckpt: Path | str | None = None,
    schedule: Schedule = SCHEDULE,
    callbacks: tuple[Any, ...] = (),
    compile: bool = False,
    **settings: Any,
) -> tuple[Recorder, pl.Trainer]:
    mixup = None if plan is QUIET else {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}
    # Gradients that are zero but for rounding (those of the keys' biases) must not become steps of full length.
    adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3 if plan is QUIET else 1e-8)
    module = Recorder(plan, adamw, schedule, seed=1, compile=compile, mixup=mixup)
    if ckpt is not None:
        module.start_at(Path(ckpt))
    settings = {
        "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "max_epochs": -1,
        "enable_progress_bar": False, "enable_model_summary": False, "use_distributed_sampler": False,
        "val_check_interval": 7, "check_val_every_n_epoch": None, "limit_val_batches": 2, "log_every_n_steps": 1,
        "gradient_clip_val": 0.5, "num_sanity_val_steps": 1, "barebones": False, **settings,
    }  # fmt: skip
    trainer = pl.Trainer(**settings, max_steps=plan.steps, callbacks=[Ledger(), Told(), *callbacks])
    VCycleLoop.attach(trainer, module)
    trainer.fit(module, train or loader(), DataLoader(Indexed(16), batch_size=8), ckpt_path=ckpt)
    return module, trainer


def weights(module: Recorder) -> dict[str, torch.Tensor]:
    assert module.network is not None
    return module.network.state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
