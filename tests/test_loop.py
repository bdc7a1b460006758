"""VCycleLoop: a plan inside one Trainer.fit. The data are images whose first pixel is their index."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from conftest import TINY
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from torch.utils.data import DataLoader, Dataset

from mlframe.architectures import VIT
from mlframe.checkpoint import LastCheckpoint
from mlframe.data.loader import Key, ResumableLoader, ResumableSampler
from mlframe.errors import ConfigError
from mlframe.ledger import Ledger
from mlframe.levels import make_levels
from mlframe.loop import VCycleLoop
from mlframe.module import ImageClassification
from mlframe.operators import coalesce, decoalesce, interpolate
from mlframe.plan import Plan, scratch, vcycle
from mlframe.rows import Rows, read_rows
from mlframe.schedule import Schedule

LEVELS = make_levels(VIT, {**TINY, "drop_path_rate": 0.1, "proj_drop_rate": 0.1}, count=3)
PLAN = vcycle(LEVELS, 26, e_a=[5, 4], e_small=[3, 6], alpha=[0.25, 0.5])  # levels 0 1 2 1 0: 5 4 6 3 8 steps
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
        super().__init__(*args, mixup={"mixup_alpha": 0.8, "cutmix_alpha": 1.0}, **kwargs)
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


def loader(size: int = 48, batch: int = 4, workers: int = 0) -> ResumableLoader:
    return ResumableLoader(Indexed(size), ResumableSampler(size, batch, seed=7), num_workers=workers)


def fit(
    plan: Plan = PLAN,
    train: ResumableLoader | None = None,
    ckpt: Path | str | None = None,
    schedule: Schedule = SCHEDULE,
    callbacks: tuple[Any, ...] = (),
    **settings: Any,
) -> tuple[Recorder, pl.Trainer]:
    module = Recorder(plan, partial(torch.optim.AdamW, lr=1e-2), schedule, seed=1)
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


# resuming


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
