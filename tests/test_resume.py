"""Going on from a checkpoint: the same bits as without a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_fit import LEVELS, TWO, SaveAtValidation, fit, loader, same, weights

from mlframe.checkpoint import AtomicCheckpointIO, LastCheckpoint
from mlframe.errors import ConfigError
from mlframe.ledger import Ledger
from mlframe.plan import vcycle
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


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 2},
        {"accumulate_grad_batches": 3, "precision": "bf16-mixed", "workers": 2},
        {"accumulate_grad_batches": 2, "precision": "bf16-true", "gradient_clip_val": None, "limit_train_batches": 6},
    ],
    ids=str,
)
def test_a_resume_from_inside_an_accumulation_window(settings: dict[str, Any], tmp_path: Path) -> None:
    """Validations, every 7 batches, cut windows in two; the gradients of the first part are in the checkpoint."""
    workers = settings.pop("workers", 0)
    whole, _ = fit(train=loader(workers=workers), callbacks=(SaveAtValidation(tmp_path),), **settings)
    inside = 0
    for path in sorted(tmp_path.glob("*.ckpt"))[::2]:
        inside += "open_window" in torch.load(path)
        resumed, _ = fit(train=loader(workers=workers), ckpt=path, **settings)
        assert same(weights(resumed), weights(whole)), path.name
        assert resumed.seen == whole.seen[int(path.stem) + 1 :], path.name
    assert inside >= 2


def test_gradients_of_an_open_window_are_what_makes_it_exact(tmp_path: Path) -> None:
    """The control: without them the resumed run ends elsewhere."""
    whole, _ = fit(callbacks=(SaveAtValidation(tmp_path),), accumulate_grad_batches=2)
    saved = torch.load(tmp_path / "006.ckpt")
    del saved["open_window"]
    torch.save(saved, tmp_path / "without.ckpt")
    assert not same(weights(fit(ckpt=tmp_path / "without.ckpt", accumulate_grad_batches=2)[0]), weights(whole))


def test_twice_in_a_row_with_workers_and_bf16(tmp_path: Path) -> None:
    """Stopped at step 6 (an epoch's end), then at 15 (a phase's end), then on to the end; moments and rates too."""
    settings: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}

    def every(name: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=1, save_top_k=-1)

    def run(name: str, ckpt: Path | None = None) -> tuple[Any, pl.Trainer]:
        return fit(train=loader(workers=2), ckpt=ckpt, callbacks=(every(name),), enable_checkpointing=True, **settings)

    whole, trainer = run("whole")
    run("second", tmp_path / "whole" / "step=6.ckpt")
    third, again = run("third", tmp_path / "second" / "step=15.ckpt")
    assert same(weights(third), weights(whole))
    assert third.seen == whole.seen[30:]
    one, other = (t.optimizers[0].state_dict() for t in (trainer, again))
    assert one["param_groups"] == other["param_groups"]
    assert all(torch.equal(one["state"][i][k], other["state"][i][k]) for i in one["state"] for k in one["state"][i])


def test_each_level_is_compiled_and_a_resume_is_as_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's compiler without its slow last stage. Names stay, so compiled and plain runs read one another."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(sum(p.numel() for p in inputs if isinstance(p, torch.nn.Parameter)))
        return graph.forward

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: compile_module(self, backend=backend, **kw))
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=7, save_top_k=-1)
    whole, _ = fit(callbacks=(every,), compile=True, enable_checkpointing=True)
    sizes = {level.parameters for level in LEVELS}
    assert sizes <= set(graphs), "a graph for each level"
    assert same(weights(whole), weights(fit()[0])), "the same operations, so the same bits"
    seen = len(graphs)
    assert same(weights(fit(ckpt=tmp_path / "step=14.ckpt", compile=True)[0]), weights(whole))
    assert len(graphs) > seen
    assert same(weights(fit(ckpt=tmp_path / "step=14.ckpt")[0]), weights(whole))
    assert not any("_orig_mod" in name for name in torch.load(tmp_path / "step=14.ckpt")["state_dict"])


@pytest.mark.parametrize("stops", [(4,), (3, 6), (10,)], ids=str)
def test_each_sample_once_an_epoch_whatever_the_stops(stops: tuple[int, ...], tmp_path: Path) -> None:
    """Case A6: 20 samples, batches of 2, 14 steps (an epoch ends at 10), shuffled, with dropout; two levels."""
    plan = vcycle(TWO, 14, 3, 6, 0.5)

    def run(until: int, ckpt: Path | None = None) -> list[tuple[int, int, float, list[int]]]:
        class Stop(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                trainer.should_stop = trainer.global_step == until < plan.steps

        last = LastCheckpoint(tmp_path, every=1000)
        rows = Rows(tmp_path / "stopped")
        callbacks = (Stop(), last)
        module, _ = fit(plan, loader(20, 2), ckpt, callbacks=callbacks, logger=rows, enable_checkpointing=True)
        final.update(weights(module))
        return module.seen

    final: dict[str, torch.Tensor] = {}
    seen, ckpt = [], None
    for until in (*stops, plan.steps):
        seen += run(until, ckpt)
        ckpt = tmp_path / "last.ckpt"
    straight, _ = fit(plan, loader(20, 2), logger=Rows(tmp_path / "straight"))
    assert seen == straight.seen
    assert same(final, weights(straight))
    indices = [index for _, _, _, batch in seen for index in batch]
    assert sorted(indices[:20]) == list(range(20))
    assert len(set(indices[20:])) == 8
    losses = [[row["train/loss"] for row in read_rows(tmp_path / name / "metrics.csv") if row["train/loss"]]
              for name in ("straight", "stopped")]  # fmt: skip
    assert losses[0] == losses[1]
    assert len(losses[0]) == 14


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


def test_a_full_disk_is_one_line_and_leaves_the_old_checkpoint_whole(tmp_path: Path) -> None:
    class Full(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                (tmp_path / ".last.ckpt.part").symlink_to("/dev/full")

    settings: dict[str, Any] = {"enable_checkpointing": True, "plugins": [AtomicCheckpointIO()]}
    with pytest.raises(ConfigError, match=r"No space left on device.*the checkpoint of before is whole") as error:
        fit(callbacks=(Full(), LastCheckpoint(tmp_path, every=3)), **settings)
    assert "\n" not in str(error.value)
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 3
    assert not (tmp_path / ".last.ckpt.part").is_symlink()
    assert same(weights(fit(ckpt=tmp_path / "last.ckpt")[0]), weights(fit()[0]))
