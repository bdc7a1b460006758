"""VCycleLoop: a plan inside one Trainer.fit (the small fits are in small_fit.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from small_fit import PLAN, SCHEDULE, TWO, Recorder, fit, loader, same, weights

from mlframe.architectures import VIT
from mlframe.data.loader import ResumableSampler
from mlframe.errors import ConfigError
from mlframe.operators import coalesce, decoalesce, interpolate
from mlframe.plan import scratch, vcycle
from mlframe.rows import Rows, read_rows
from mlframe.schedule import Schedule


def steps_by_phase(module: Recorder) -> list[int]:
    return [len({step for step, phase, _, _ in module.seen if phase == i}) for i in range(len(module.plan.phases))]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3, "precision": "bf16-mixed"},
        {"precision": "bf16-true", "gradient_clip_val": None},
        {"val_check_interval": 1.0, "check_val_every_n_epoch": 1},
        {"limit_train_batches": 5},
    ],
    ids=str,
)
def test_each_phase_takes_its_steps_at_the_rate_of_the_closed_form(settings: dict[str, Any]) -> None:
    module, trainer = fit(**settings)
    assert trainer.global_step == PLAN.steps
    assert steps_by_phase(module) == [5, 4, 6, 3, 8]
    assert module.level.index == 0
    assert module.parked == {}
    assert module.fresh == [True] * 4, "the optimizer starts afresh in each phase"
    previous = -1
    for step, phase, rate, _ in module.seen:
        assert phase == PLAN.phase_at(step)
        assert rate == pytest.approx(1e-2 * SCHEDULE.factor(PLAN, step), rel=1e-12)
        assert step in (previous, previous + 1), "the global step never jumps"
        previous = step


def test_the_rate_of_a_schedule_over_the_whole_cycle() -> None:
    whole = Schedule("wsd", "cycle", warmup=3, decay=0.3, rewarm=2)
    module, _ = fit(schedule=whole)
    assert [rate for _, _, rate, _ in module.seen] == [1e-2 * whole.factor(PLAN, step) for step in range(26)]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_stream_goes_on_across_transitions(accumulate: int, workers: int) -> None:
    module, _ = fit(train=loader(workers=workers), accumulate_grad_batches=accumulate)
    expected: list[list[int]] = []
    for epoch in range(6):
        sampler = ResumableSampler(48, 4, seed=7)
        sampler.set_epoch(epoch)
        expected += [[index for index, _ in keys] for keys in sampler]
    seen = [indices for _, _, _, indices in module.seen]
    assert len(seen) == 26 * accumulate
    assert seen == expected[: len(seen)]


def test_no_validation_sanity_check_or_logging_changes_what_is_trained() -> None:
    plain, _ = fit(limit_val_batches=0, num_sanity_val_steps=0, log_every_n_steps=1000)
    assert same(weights(plain), weights(fit(val_check_interval=3, num_sanity_val_steps=2)[0]))


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_the_way_up_interpolates_with_the_parked_weights(alpha: float) -> None:
    """A last phase of no steps leaves exactly what the transition made."""
    full, _ = fit(scratch(TWO, 5))
    down, _ = fit(vcycle(TWO, 12, 5, 7, 0.0))
    assert same(weights(down), weights(full)), "alpha 0 is the parked network to the bit"
    mixed, _ = fit(vcycle(TWO, 12, 5, 7, alpha))

    small = coalesce(weights(full), VIT, TWO[0].sizes, TWO[1].scheme)
    kept: dict[str, dict[str, torch.Tensor]] = {}

    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 5:
                kept["start"] = {name: x.clone() for name, x in weights(module).items()}

        def on_train_batch_end(
            self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            kept["end"] = {name: x.clone() for name, x in weights(module).items()}

    fit(vcycle(TWO, 12, 5, 7, alpha), callbacks=(Keep(),))
    assert same(kept["start"], small), "the small network starts from the coalesced one"
    grown = decoalesce(kept["end"], VIT, TWO[1].sizes, TWO[1].scheme, seed=1)
    assert same(weights(mixed), interpolate(weights(full), grown, alpha))


def test_early_stopping_and_best_checkpoints_wake_in_the_last_phase(tmp_path: Path) -> None:
    class Worse(EarlyStopping):
        """Any later validation counts as worse: unguarded, this stops at the second validation."""

        def _evaluate_stopping_criteria(self, current: torch.Tensor) -> tuple[bool, str]:
            checked.append(int(fit_loop_step()))
            return super()._evaluate_stopping_criteria(current)

    checked: list[int] = []
    best = ModelCheckpoint(tmp_path, "{step}", monitor="val/loss", save_top_k=-1)
    stop = Worse("val/loss", patience=1000)
    trainers: list[pl.Trainer] = []

    def fit_loop_step() -> int:
        return trainers[0].global_step

    class Remember(pl.Callback):
        def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
            trainers.append(trainer)

    _, trainer = fit(callbacks=(best, stop, Remember()), enable_checkpointing=True, val_check_interval=3)
    assert trainer.global_step == 26
    assert checked == [21, 24], "validations before step 18 are of other levels"
    assert sorted(int(path.stem.split("=")[1]) for path in tmp_path.glob("*.ckpt")) == [21, 24]


@pytest.mark.parametrize(
    "callback", [WeightAveraging(), StochasticWeightAveraging(swa_lrs=1e-2)], ids=lambda c: type(c).__name__
)
def test_callbacks_that_hold_the_network_are_refused_by_name(callback: pl.Callback) -> None:
    with pytest.raises(ConfigError, match=f"{type(callback).__name__} averages the weights of one network"):
        fit(callbacks=(callback,))


def test_strategies_that_cannot_follow_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="ModelParallelStrategy is not supported"):
        fit(strategy=pl.strategies.ModelParallelStrategy(), devices=2)


def test_fast_dev_run_takes_its_steps_in_every_phase() -> None:
    module, trainer = fit(PLAN.shortened(2), fast_dev_run=2)
    assert steps_by_phase(module) == [2, 2, 2, 2, 2]
    assert trainer.global_step == 10


# the ledger


@pytest.mark.parametrize(("accumulate", "batch"), [(1, 4), (2, 2)])
def test_flops_are_exact_never_fall_and_stand_in_every_row(accumulate: int, batch: int, tmp_path: Path) -> None:
    """Case A2: 4 large, 8 small, 4 large steps; half the micro-batch and twice the accumulation are the same cost."""
    plan = vcycle(TWO, 16, 4, 8, 0.5)
    fit(plan, loader(batch=batch), accumulate_grad_batches=accumulate, logger=Rows(tmp_path), val_check_interval=5)
    rows = read_rows(tmp_path / "metrics.csv")
    flops = [int(row["total_flops"]) for row in rows]
    assert flops == sorted(flops)
    assert flops[-1] == 4 * (8 * TWO[0].flops + 8 * TWO[1].flops) == plan.flops(4)
    assert [int(row["images"]) for row in rows if row["train/loss"]] == [4 * (i + 1) for i in range(16)]
    assert all(row["wall_time"] and row["level"] and row["phase"] and row["parameters"] for row in rows)
    validated = [row for row in rows if row["val/loss"]]
    assert len(validated) == 16 * accumulate // 5
    assert all(row["val/acc"] and int(row["total_flops"]) > 0 for row in validated)
    by_level = {row["level"]: int(row["parameters"]) for row in rows}
    assert by_level == {"0": TWO[0].parameters, "1": TWO[1].parameters}
