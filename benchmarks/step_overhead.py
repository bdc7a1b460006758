"""Steps per second of VCycleLoop against a bare PyTorch loop: the same network, batches, optimizer and clipping.

python benchmarks/step_overhead.py        (an idle machine; some three minutes)

The default experiment's full model and its small level. The loops take turns in blocks, in rotating order, so that a
machine that speeds up or slows down touches all alike; blocks are compared pairwise, and by the least of each. "as
configured" logs every 10 steps to metrics.csv and shows the progress bar, as `make train-deit` does.
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
BATCH, WARM_UP, STEPS, BLOCKS = 128, 10, 60, 9
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
            ways = {
                "bare": partial(bare, levels[level], data),
                "loop": partial(ours, levels, level, data, False, folder),
                "as configured": partial(ours, levels, level, data, True, folder),
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for block in range(BLOCKS):
                order = [list(ways)[(block + i) % len(ways)] for i in range(len(ways))]
                for name in order:
                    seconds[name].append(ways[name]())
            table += [(level, name, values, seconds["bare"]) for name, values in seconds.items()]
    print(f"{torch.get_num_threads()} threads, batch {BATCH}, {BLOCKS} blocks of {STEPS} steps")
    for level, name, values, base in table:
        over = statistics.median(v / b for v, b in zip(values, base, strict=True)) - 1
        milliseconds = [1e3 * value / STEPS for value in values]
        print(
            f"level {level}  {name:14} {1e3 / statistics.median(milliseconds):6.2f} steps/s  "
            f"ms a step: median {statistics.median(milliseconds):.2f}, least {min(milliseconds):.2f}; "
            f"over bare, median of blocks {over:+.1%}, of the least {min(values) / min(base) - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
