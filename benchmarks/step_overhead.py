"""Steps per second of VCycleLoop against a bare PyTorch loop: the same network, batches, optimizer and clipping.

python benchmarks/step_overhead.py        (an idle machine; some three minutes)

The default experiment's full model and its small level. Blocks of the two loops alternate, so that a machine that
speeds up or slows down touches both alike; the figure is the median over blocks. "as configured" logs every 10 steps to
metrics.csv and shows the progress bar, as `make train-deit` does.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from mlframe import VIT, ImageClassification, Ledger, Level, Schedule, VCycleLoop, make_levels, scratch
from mlframe.progress import CycleProgress
from mlframe.rows import Rows

CONFIG = {
    "model_name": "deit_tiny_patch16_224", "img_size": 28, "patch_size": 7, "in_chans": 1, "num_classes": 10,
    "embed_dim": 64, "depth": 6, "num_heads": 4,
}  # fmt: skip
BATCH, WARM_UP, STEPS, BLOCKS = 128, 10, 60, 7
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.05)


def batches() -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    count = BATCH * (WARM_UP + STEPS + 1)
    images = torch.randn(count, 1, 28, 28, generator=generator)
    return DataLoader(TensorDataset(images, torch.arange(count) % 10), batch_size=BATCH)


class Clock(pl.Callback):
    """Seconds from the end of step WARM_UP to the end of step WARM_UP + STEPS."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM_UP:
            self.start = time.perf_counter()
        self.seconds = time.perf_counter() - getattr(self, "start", 0.0)


def bare(level: Level, data: DataLoader) -> float:
    network = level.build()
    optimizer = ADAMW(network.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for step, (images, labels) in enumerate(data):
        if step == WARM_UP:
            start = time.perf_counter()
        if step == WARM_UP + STEPS:
            break
        loss = functional.cross_entropy(network(images), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return time.perf_counter() - start


def ours(levels: tuple[Level, ...], level: int, data: DataLoader, configured: bool, folder: str) -> float:
    clock = Clock()
    module = ImageClassification(scratch(levels, WARM_UP + STEPS, level), ADAMW, Schedule("constant"))
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, gradient_clip_val=1.0, limit_val_batches=0, log_every_n_steps=10,
        logger=Rows(folder) if configured else False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=configured, callbacks=[Ledger(), *([CycleProgress()] if configured else []), clock],
    )  # fmt: skip
    VCycleLoop.attach(trainer, module)
    trainer.fit(module, data)
    return clock.seconds


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    levels, data = make_levels(VIT, CONFIG), batches()
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for level in (0, 1):
            seconds: dict[str, list[float]] = {"bare": [], "loop": [], "as configured": []}
            for _ in range(BLOCKS):
                seconds["bare"].append(bare(levels[level], data))
                seconds["loop"].append(ours(levels, level, data, False, folder))
                seconds["as configured"].append(ours(levels, level, data, True, folder))
            table += [(level, name, values) for name, values in seconds.items()]
    print(f"{torch.get_num_threads()} threads, batch {BATCH}, median of {BLOCKS} blocks of {STEPS} steps")
    for level, name, values in table:
        base = statistics.median(next(v for lv, n, v in table if lv == level and n == "bare"))
        median, step = statistics.median(values), 1e3 / STEPS
        rate, low, high = STEPS / median, min(values) * step, max(values) * step
        print(
            f"level {level}  {name:14} {rate:7.2f} steps/s  {median * step:6.2f} ms  {median / base - 1:+.1%}"
            f"   (blocks {low:.2f} to {high:.2f} ms)"
        )


if __name__ == "__main__":
    main()
