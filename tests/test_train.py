"""train(): going on after a stop, and bad input in one clear line before anything is written."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from safetensors.torch import load_file

from mlframe.errors import ConfigError, Interrupted
from mlframe.module import ImageClassification
from mlframe.rows import Rows, read_rows
from mlframe.train import CONF, train


def config_of(images: Path, run: Path, *overrides: str) -> DictConfig:
    settings = [
        "experiment=deit_fashion", "data=image_folder", f"data.source.folder={images}", "data.workers=0",
        f"run_dir={run}", "data.batch_size=16", "steps=20", "trainer.val_check_interval=4", "logger=none",
        "trainer.log_every_n_steps=1", "trainer.accelerator=cpu", "callbacks.last.every=4", "callbacks.progress=null",
    ]  # fmt: skip
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [*settings, *overrides])


def untimed(folder: Path) -> list[dict[str, str]]:
    return [{k: v for k, v in row.items() if k != "wall_time"} for row in read_rows(folder / "metrics.csv")]


@pytest.mark.parametrize("dies_at", [1, 4, 10, 17])
def test_a_run_that_dies_goes_on_to_the_same_weights_and_rows(
    dies_at: int, image_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(config_of(image_set, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        step = ImageClassification.training_step

        def dying(self: ImageClassification, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.trainer.global_step == dies_at:
                raise RuntimeError("the power is gone")
            return step(self, batch, batch_idx)

        patch.setattr(ImageClassification, "training_step", dying)
        with pytest.raises(RuntimeError, match="the power is gone"):
            train(config_of(image_set, tmp_path / "stopped"))
    assert not (tmp_path / "stopped" / "results.json").exists()
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")  # case A5
    train(config_of(image_set, tmp_path / "stopped"))
    whole, stopped = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert untimed(tmp_path / "whole") == untimed(tmp_path / "stopped")


def test_a_run_that_dies_after_training_is_not_trained_again(
    image_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a broken test image")

    with monkeypatch.context() as patch:
        patch.setattr(ImageClassification, "test_step", broken)
        with pytest.raises(RuntimeError, match="a broken test image"):
            train(config_of(image_set, tmp_path))
    assert (tmp_path / "final" / "model.safetensors").exists()
    monkeypatch.setattr(ImageClassification, "training_step", broken)
    results = train(config_of(image_set, tmp_path))
    assert results["steps"] == 20
    assert results["total_flops"] > 0


def test_a_damaged_checkpoint_is_named(image_set: Path, tmp_path: Path) -> None:
    train(config_of(image_set, tmp_path, "steps=4"))
    (tmp_path / "results.json").unlink()
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"last\.ckpt cannot be read .*: remove it, or add resume=never"):
        train(config_of(image_set, tmp_path, "steps=4"))


def test_a_run_out_of_time_goes_on_with_more_of_it(image_set: Path, tmp_path: Path) -> None:
    assert train(config_of(image_set, tmp_path, "trainer.max_time={seconds: 0}")) == {}
    assert train(config_of(image_set, tmp_path, "trainer.max_time={minutes: 5}"))["steps"] == 20


def test_another_configuration_does_not_go_on_in_the_folder(image_set: Path, tmp_path: Path) -> None:
    train(config_of(image_set, tmp_path, "steps=4"))
    with pytest.raises(ConfigError, match=r"another configuration \(optimizer\.lr was 0\.002, is 0\.5\)"):
        train(config_of(image_set, tmp_path, "steps=4", "optimizer.lr=0.5"))
    assert train(config_of(image_set, tmp_path, "steps=1", "resume=never"))["steps"] == 1
    assert [row["step"] for row in read_rows(tmp_path / "metrics.csv") if row["train/loss"]] == ["0"], "no stale rows"


def test_a_run_begins_at_a_checkpoint_of_another(image_set: Path, tmp_path: Path) -> None:
    """ckpt_path: the same plan ends in the same weights, a longer last phase goes on longer, others are refused."""
    train(config_of(image_set, tmp_path / "whole", "callbacks.last.every=13", "trainer.max_time={minutes: 5}"))
    best = tmp_path / "whole" / "checkpoints" / "best.ckpt"
    saved = torch.load(best)["global_step"]
    assert saved in (16, 20)
    train(config_of(image_set, tmp_path / "fork", f"ckpt_path='{best}'"))
    whole, fork = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("whole", "fork"))
    assert all(torch.equal(whole[name], fork[name]) for name in whole)
    steps = [row["step"] for row in read_rows(tmp_path / "fork" / "metrics.csv") if row.get("train/loss")]
    assert steps == [str(step) for step in range(saved, 20)]
    plan = ["plan.e_a=[1]", "plan.e_small=[10]"]
    assert train(config_of(image_set, tmp_path / "longer", f"ckpt_path='{best}'", "steps=22", *plan))["steps"] == 22
    for override, message in (
        ("steps=12", r"stands at step \d+ in phase 3, which this plan does not have"),
        ("model.config.depth=4", r"of a network of another shape \(layers 6 and here 4\)"),
        ("ckpt_path=nowhere.ckpt", "ckpt_path: there is no checkpoint nowhere.ckpt"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(config_of(image_set, tmp_path / "wrong", f"ckpt_path='{best}'", override))
    assert not (tmp_path / "wrong").exists()


def test_a_run_goes_on_with_other_batches_of_the_same_step(
    image_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["trainer.val_check_interval=100", "callbacks.last.every=7"]
    rows = Rows.log_metrics

    def stopping(self: Rows, metrics: dict[str, float], step: int | None = None) -> None:
        rows(self, metrics, step)
        if step == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Rows, "log_metrics", stopping)
        with pytest.raises(Interrupted):
            train(config_of(image_set, tmp_path, *settings))
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 10
    halves = ["data.batch_size=8", "trainer.accumulate_grad_batches=2", "trainer.val_check_interval=200"]
    with pytest.raises(ConfigError, match="holds a run with 16 samples in a step, and this one has 8"):
        train(config_of(image_set, tmp_path, *settings, "data.batch_size=8"))
    assert train(config_of(image_set, tmp_path, *settings, *halves))["images"] == 20 * 16
