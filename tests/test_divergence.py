"""A fit whose loss or weights are no longer finite ends, and leaves no checkpoint of that state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_fit import fit

from mlframe.checkpoint import LastCheckpoint
from mlframe.divergence import Divergence
from mlframe.errors import Diverged


class Poison(pl.Callback):
    """Makes one micro-batch of step `step` infinite, or the weights after it."""

    def __init__(self, step: int, micro: int = 0, weights: bool = False) -> None:
        self.at, self.weights = (step - 1, micro), weights
        self._seen: dict[int, int] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        micro = self._seen[trainer.global_step] = self._seen.get(trainer.global_step, -1) + 1
        if (trainer.global_step, micro) == self.at and not self.weights:
            batch[0].fill_(float("inf"))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if self.weights and trainer.global_step == self.at[0] + 1:
            module.network.norm.weight.data[0] = float("inf")


def saved(folder: Path) -> dict[str, Any]:
    checkpoint = torch.load(folder / "last.ckpt")
    assert all(x.isfinite().all() for x in checkpoint["state_dict"].values() if x.is_floating_point())
    return checkpoint


@pytest.mark.parametrize(("accumulate", "micro"), [(1, 0), (2, 0), (2, 1)])
def test_any_micro_batch_ends_the_fit_before_the_next_save(accumulate: int, micro: int, tmp_path: Path) -> None:
    callbacks = (Divergence(), Poison(10, micro), LastCheckpoint(tmp_path, every=4))
    settings = {"enable_checkpointing": True, "accumulate_grad_batches": accumulate, "log_every_n_steps": 50}
    with pytest.raises(Diverged, match=r"^diverged: train/loss is nan at step 10 of 26 \(phase 3/5 .*rate 0\.\d+\)$"):
        fit(callbacks=callbacks, val_check_interval=200, limit_val_batches=0, **settings)
    assert saved(tmp_path)["global_step"] == 8


def test_without_saves_it_is_seen_at_the_next_logged_step_or_the_end() -> None:
    class Count(pl.Callback):
        steps = 0

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            self.steps = trainer.global_step

    # Phases end at steps 5, 9, 15, 18 and 26; they are looked at too.
    for every, poisoned, seen in ((4, 20, 20), (4, 21, 24), (50, 2, 5), (50, 25, 26)):
        count = Count()
        with pytest.raises(Diverged, match=f"train/loss is nan at step {poisoned} of 26") as error:
            fit(callbacks=(Divergence(), Poison(poisoned), count), log_every_n_steps=every, limit_val_batches=0)
        assert (count.steps, error.value.step) == (seen, poisoned)


def test_weights_that_the_last_step_broke_are_not_saved(tmp_path: Path) -> None:
    callbacks = (Divergence(), Poison(8, weights=True), LastCheckpoint(tmp_path, every=4))
    with pytest.raises(Diverged, match=r"^diverged: a weight is inf at step 8 of 26"):
        fit(callbacks=callbacks, enable_checkpointing=True, log_every_n_steps=50, limit_val_batches=0)
    assert saved(tmp_path)["global_step"] == 4


@pytest.mark.parametrize("sanity", [True, False])
def test_a_validation_counts_too_but_not_the_trial_before_training(sanity: bool) -> None:
    class Spoil(pl.Callback):
        def on_validation_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, *_: Any) -> None:
            if trainer.sanity_checking == sanity:
                batch[0].fill_(float("nan"))

    if sanity:
        assert fit(callbacks=(Divergence(), Spoil()))[1].global_step == 26
    else:
        with pytest.raises(Diverged, match=r"^diverged: val/loss is nan at step 7 of 26"):
            fit(callbacks=(Divergence(), Spoil()))
