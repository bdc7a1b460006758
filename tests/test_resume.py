"""Going on from a checkpoint: the same bits as without a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_fit import fit, same, weights

from mlframe.checkpoint import LastCheckpoint
from mlframe.ledger import Ledger
from mlframe.rows import Rows, read_rows


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resume_from_any_step_ends_in_the_same_bits(accumulate: int, tmp_path: Path) -> None:
    """Phase boundaries (5, 9, 15, 18), epoch boundaries (12 and 24 batches) and all steps between."""
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    settings: dict[str, Any] = {"accumulate_grad_batches": accumulate, "enable_checkpointing": True}
    whole, trainer = fit(callbacks=(every,), **settings)
    ledger = next(c for c in trainer.callbacks if isinstance(c, Ledger))
    for step in (1, 4, 5, 6, 9, 12, 15, 17, 18, 19, 24, 25):
        anew = ModelCheckpoint(tmp_path / "anew", "{step}", every_n_train_steps=1)
        resumed, again = fit(ckpt=tmp_path / f"step={step}.ckpt", callbacks=(anew,), **settings)
        assert same(weights(resumed), weights(whole)), f"from step {step}"
        assert resumed.seen == whole.seen[step * accumulate :], f"from step {step}"
        counted = next(c for c in again.callbacks if isinstance(c, Ledger))
        assert (counted.total_flops, counted.samples) == (ledger.total_flops, ledger.samples)


def test_a_kill_right_after_a_save_loses_no_row_and_no_validation(tmp_path: Path) -> None:
    """Saves and validations fall on the same steps (3, 6, ...): the save comes after the validation."""

    class Killed(RuntimeError):
        pass

    class Kill(pl.Callback):
        def on_step_done(self, trainer: pl.Trainer) -> None:
            if trainer.global_step == 21:
                raise Killed

    def run(name: str, *more: pl.Callback, ckpt: Path | None = None) -> None:
        best = ModelCheckpoint(
            tmp_path / name, "{step}", monitor="val/loss", save_top_k=-1, enable_version_counter=False
        )
        last = LastCheckpoint(tmp_path / name, every=3)
        settings: dict[str, Any] = {
            "enable_checkpointing": True,
            "val_check_interval": 3,
            "logger": Rows(tmp_path / name),
        }
        fit(callbacks=(best, *more, last), ckpt=ckpt, **settings)

    run("whole")
    kill = Kill()
    with pytest.raises(Killed):
        run("killed", kill)
    # `Kill` stands before the save of step 21 in the list: what is there is the save of step 18.
    assert torch.load(tmp_path / "killed" / "last.ckpt")["global_step"] in (18, 21)
    run("killed", ckpt=tmp_path / "killed" / "last.ckpt")
    rows = [[{k: v for k, v in row.items() if k != "wall_time"} for row in read_rows(tmp_path / name / "metrics.csv")]
            for name in ("whole", "killed")]  # fmt: skip
    assert rows[0] == rows[1]
    kept = [sorted(path.name for path in (tmp_path / name).glob("step=*.ckpt")) for name in ("whole", "killed")]
    assert kept[0] == kept[1] == ["step=21.ckpt", "step=24.ckpt"]


def test_a_checkpoint_holds_tensors_and_plain_containers_and_the_parked_weights(tmp_path: Path) -> None:
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=12, save_top_k=-1)
    fit(callbacks=(every,), enable_checkpointing=True)
    saved = torch.load(tmp_path / "step=12.ckpt", weights_only=True)
    assert saved["vcycle"]["phase"] == 2
    shapes = {level: tuple(state["cls_token"].shape) for level, state in saved["vcycle"]["parked"].items()}
    assert shapes == {"0": (1, 1, 32), "1": (1, 1, 16)}
    assert tuple(saved["state_dict"]["network.cls_token"].shape) == (1, 1, 8)


def test_no_time_at_all_trains_nothing() -> None:
    assert fit(max_time={"seconds": 0})[1].global_step == 0


@pytest.mark.parametrize("step", [7, 9])
def test_a_run_that_is_stopped_stays_in_its_phase_and_goes_on_exactly(step: int, tmp_path: Path) -> None:
    """As max_time does it, inside phase 1 and at its end."""

    class Stop(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.global_step == step

    settings: dict[str, Any] = {
        "enable_checkpointing": True,
        "default_root_dir": tmp_path,
        "accumulate_grad_batches": 2,
    }
    module, trainer = fit(callbacks=(Stop(), LastCheckpoint(tmp_path, every=5)), **settings)
    assert (trainer.global_step, module.phase_index) == (step, 1)
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == step
    resumed, _ = fit(ckpt=tmp_path / "last.ckpt", **settings)
    assert same(weights(resumed), weights(fit(accumulate_grad_batches=2)[0]))
