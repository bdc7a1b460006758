"""What mlframe/loop.py uses of Lightning's private API. A failure here says what a new version moved."""

from __future__ import annotations

import inspect
import os

import lightning
import lightning.pytorch as pl
import pytest
from lightning.pytorch import loops
from lightning.pytorch.trainer import call

USED = {
    "_FitLoop": ["on_run_end", "setup_data", "load_state_dict", "state_dict", "total_batch_idx"],
    "_TrainingEpochLoop": [
        "advance",
        "on_advance_end",
        "global_step",
        "restarted_on_last",
        "_should_check_val_fx",
        "_broadcast_sigterm_tensor",
        "done",
    ],
    "_EvaluationLoop": ["restarted_mid_evaluation"],
}


def moved(what: str) -> str:
    return f"Lightning {lightning.__version__} moved {what}, which mlframe/loop.py uses: adapt it, or bound the version"


@pytest.mark.skipif("LIGHTNING" not in os.environ, reason="only `make versions` asks for a version")
def test_the_version_that_make_versions_names_is_the_one_in_use() -> None:
    assert lightning.__version__ == os.environ["LIGHTNING"]


@pytest.mark.parametrize("name", USED)
def test_the_loops_and_their_members_are_there(name: str) -> None:
    loop = getattr(loops, name, None)
    assert loop is not None, moved(f"loops.{name}")
    for member in USED[name]:
        assert hasattr(loop, member), moved(f"{name}.{member}")


def test_signatures() -> None:
    assert list(inspect.signature(loops._FitLoop.__init__).parameters) == [
        "self",
        "trainer",
        "min_epochs",
        "max_epochs",
    ]
    epoch_loop = inspect.signature(loops._TrainingEpochLoop.__init__).parameters
    assert list(epoch_loop) == ["self", "trainer", "min_steps", "max_steps"], moved("_TrainingEpochLoop's arguments")
    assert list(inspect.signature(loops._TrainingEpochLoop.advance).parameters) == ["self", "data_fetcher"]
    assert hasattr(call, "_call_configure_model"), moved("trainer.call._call_configure_model")


def test_the_loop_state_that_the_epoch_repair_rewrites() -> None:
    loop = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False).fit_loop
    state = loop.state_dict()
    assert set(state["epoch_progress"]) >= {"total", "current"}, moved("the key epoch_progress")
    assert "is_last_batch" in state["epoch_loop.batch_progress"], moved("the key epoch_loop.batch_progress")
    assert "_batches_that_stepped" in state["epoch_loop.state_dict"], moved("the key _batches_that_stepped")
    assert {"ready", "completed"} <= state["epoch_loop.batch_progress"]["current"].keys(), moved("the batch counters")
    assert hasattr(loop, "max_batches"), moved("_FitLoop.max_batches")
    step = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    assert "completed" in step["total"], moved("the optimizer's step counter")


def test_signals_and_the_cluster() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    handler = getattr(getattr(trainer, "_signal_connector", None), "_slurm_sigusr_handler_fn", None)
    assert handler is not None, moved("trainer._signal_connector._slurm_sigusr_handler_fn")
    assert len(inspect.signature(handler).parameters) == 2, moved("the arguments of SLURM's handler")
    for name in ("register_signal_handlers", "teardown"):
        assert f"self._signal_connector.{name}()" in inspect.getsource(pl.Trainer), moved(f"_SignalConnector.{name}")
    assert hasattr(trainer._accelerator_connector, "cluster_environment"), moved("the cluster environment")
    source = inspect.getsource(loops._TrainingEpochLoop.advance)
    assert "self._broadcast_sigterm_tensor()" in source, moved("the agreement of processes on a signal")
