"""Tokens per second of mlframe against a plain Lightning run of the same network: transformers' own loss, Trainer.fit.

python benchmarks/tokens_per_second.py        (an idle machine; some minutes)

The full networks of gpt_docs and bert_docs on random tokens. The two ways take turns in blocks, so that a machine that
speeds up or slows down touches both alike. "mlframe" is as configured: its loop, ledger, rows and progress bar.
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
from hydra import compose, initialize_config_dir
from torch.utils.data import DataLoader, TensorDataset

from mlframe import CausalLM, Ledger, Level, MaskedLM, Schedule, VCycleLoop, make_levels, scratch
from mlframe import architectures as families
from mlframe.progress import CycleProgress
from mlframe.rows import Rows
from mlframe.train import CONF

TOKENS, WARM_UP, STEPS, BLOCKS = 128, 5, 25, 7
ADAMW = partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.05)


class Clock(pl.Callback):
    """Seconds from the end of step WARM_UP to the end of step WARM_UP + STEPS."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == WARM_UP:
            self.start = time.perf_counter()
        self.seconds = time.perf_counter() - getattr(self, "start", 0.0)


class Plain(pl.LightningModule):
    """What one writes without mlframe."""

    def __init__(self, level: Level) -> None:
        super().__init__()
        self.network = level.build()

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.network(input_ids=batch[0], labels=batch[1]).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ADAMW(self.parameters())


def fit(module: pl.LightningModule, data: DataLoader, plain: bool, folder: str) -> float:
    clock = Clock()
    callbacks = [clock] if plain else [Ledger(), CycleProgress(), clock]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=-1, max_steps=WARM_UP + STEPS, gradient_clip_val=1.0,
        log_every_n_steps=10, logger=False if plain else Rows(folder), limit_val_batches=0, enable_checkpointing=False,
        enable_model_summary=False, enable_progress_bar=not plain, callbacks=callbacks,
    )  # fmt: skip
    if not plain:
        VCycleLoop.attach(trainer, module)  # type: ignore[arg-type]
    trainer.fit(module, data)
    return clock.seconds


def measure(name: str, folder: str) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", [f"experiment={name}", "run_dir=runs"])
    masked, rows, vocab = config.model.objective == "masked", config.data.batch_size, config.model.config.vocab_size
    predictions = round(0.15 * TOKENS) if masked else TOKENS
    levels = make_levels(
        getattr(families, config.model.architecture.split(".")[-1]),
        dict(config.model.config),
        sample={"tokens": TOKENS, "predictions": predictions},
    )
    ids = torch.randint(5, vocab, (rows * (WARM_UP + STEPS + 1), TOKENS))
    positions = torch.rand(ids.shape).argsort(1)[:, :predictions].sort(1).values
    labels = torch.full_like(ids, -100).scatter(1, positions, ids.gather(1, positions)) if masked else ids
    plain = DataLoader(TensorDataset(ids, labels), batch_size=rows)
    ours = DataLoader(TensorDataset(ids, *((positions, ids.gather(1, positions)) if masked else (ids,))), rows)
    rates: dict[str, list[float]] = {"plain Lightning": [], "mlframe": []}
    for block in range(BLOCKS):
        for way in list(rates)[:: 1 if block % 2 else -1]:
            if way == "mlframe":
                task = (MaskedLM if masked else CausalLM)(scratch(levels, WARM_UP + STEPS), ADAMW, Schedule("constant"))
                seconds = fit(task, ours, False, folder)
            else:
                seconds = fit(Plain(levels[0]), plain, True, folder)
            rates[way].append(STEPS * rows * TOKENS / seconds)
    for way, values in rates.items():
        least, most = f"{min(values):,.0f}", f"{max(values):,.0f}"
        print(f"{name} {way:16} {statistics.median(values):8,.0f} tokens/s (blocks {least} to {most})")
    ratio = statistics.median(a / b for a, b in zip(rates["mlframe"], rates["plain Lightning"], strict=True))
    print(f"{name} mlframe over plain, median of blocks: {ratio:.2f}")


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    print(f"{torch.get_num_threads()} threads, {BLOCKS} blocks of {STEPS} steps")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("gpt_docs", "bert_docs"):
            measure(name, folder)


if __name__ == "__main__":
    main()
