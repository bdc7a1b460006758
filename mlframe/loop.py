"""VCycleLoop: a whole plan inside one Trainer.fit.

The loops only decide *when* a phase ends: before a batch is fetched. What then happens is `transition`, which knows
nothing of loops. Steps, data stream, loggers and callbacks go on across phases, as this is one fit.

All use of Lightning's private API is in this file; tests/test_lightning_private.py names what a new version moved.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.loops import _FitLoop, _TrainingEpochLoop
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.call import _call_configure_model
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from mlframe.accumulation import OpenWindow
from mlframe.errors import ConfigError
from mlframe.interruption import Interruption
from mlframe.module import LevelModule
from mlframe.sharding import FSDP2
from mlframe.transition import transition


class VCycleLoop(_FitLoop):
    """Runs `module.plan`: stock Lightning, but for a transition before the first batch of each later phase."""

    def __init__(self, trainer: pl.Trainer, module: LevelModule, interruption: Interruption) -> None:
        stock = trainer.fit_loop
        super().__init__(trainer, min_epochs=stock.min_epochs, max_epochs=stock.max_epochs)
        self.plan = module.plan
        slurm = trainer._accelerator_connector.cluster_environment
        requeues = isinstance(slurm, SLURMEnvironment) and slurm.auto_requeue
        interruption.requeue = slurm.requeue_signal if requeues else None
        self.interruption = interruption
        self.epoch_loop = _EpochLoop(trainer, min_steps=stock.min_steps, max_steps=self.plan.steps)

    @classmethod
    def attach(cls, trainer: pl.Trainer, module: LevelModule, interruption: Interruption | None = None) -> VCycleLoop:
        """Give the trainer this loop, before `trainer.fit(module)`. Refuses what cannot follow a changing network."""
        _refuse(trainer)
        loop = cls(trainer, module, interruption or Interruption())
        trainer.fit_loop = loop
        trainer._signal_connector = _Signals(trainer)
        trainer.callbacks[:0] = [StepSeed(module.seed), OpenWindow(), loop.interruption]
        for callback in trainer.callbacks:
            if isinstance(callback, (EarlyStopping, ModelCheckpoint)) and callback.monitor is not None:
                _rank_in_last_phase(callback, module)
        if trainer.fast_dev_run:
            trainer.limit_train_batches = module.plan.steps * trainer.accumulate_grad_batches
        return loop

    @property
    def module(self) -> LevelModule:
        module = self.trainer.lightning_module
        assert isinstance(module, LevelModule)
        return module

    @property
    def phase_step(self) -> int:
        """Optimizer steps done in the current phase."""
        return self.epoch_loop.global_step - self.plan.start(self.module.phase_index)

    @property
    def in_window(self) -> bool:
        """Whether a step has accumulated some of its batches and not all."""
        return self.epoch_loop.batch_progress.current.ready % self.trainer.accumulate_grad_batches != 0

    def finish_phases(self) -> None:
        """Move on while the current phase has all its steps and another one follows."""
        module = self.module
        while module.phase_index + 1 < len(self.plan.phases) and self.phase_step >= module.phase.steps:
            with self.trainer.profiler.profile("transition"):
                transition(self.trainer, module, lambda: _call_configure_model(self.trainer))

    def setup_data(self) -> None:
        super().setup_data()
        batches, accumulate = self.max_batches, self.trainer.accumulate_grad_batches
        if batches != float("inf") and batches % accumulate:
            raise ConfigError(
                f"an epoch of {batches} batches does not hold whole steps of {accumulate} accumulated batches, so its "
                f"last step would be short: set trainer.limit_train_batches={int(batches) // accumulate * accumulate}"
            )

    def step_done(self) -> None:
        """Tell callbacks with a method `on_step_done(trainer)`: the rows and the validation of a step are done too."""
        for callback in self.trainer.callbacks:
            if (told := getattr(callback, "on_step_done", None)) is not None:
                told(self.trainer)

    def requeue(self) -> None:
        """Put the job into SLURM's queue again, as Lightning does it: with a checkpoint of its own, too."""
        self.trainer._signal_connector._slurm_sigusr_handler_fn(self.interruption.signum, None)

    def on_run_end(self) -> None:
        if self.epoch_loop.global_step >= self.plan.steps:
            self.finish_phases()  # a last phase of no steps is still a transition
            self.step_done()
        super().on_run_end()

    def on_save_checkpoint(self) -> dict[str, Any]:
        return {**super().on_save_checkpoint(), "accumulate": self.trainer.accumulate_grad_batches}

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        state_dict = _accumulating(state_dict, self.trainer.accumulate_grad_batches)
        between_epochs = state_dict.get("epoch_loop.batch_progress", {}).get("is_last_batch", False)
        super().load_state_dict(_start_of_next_epoch(state_dict) if between_epochs else state_dict, prefix)
        if between_epochs:
            self.epoch_loop.restarting = False


class _EpochLoop(_TrainingEpochLoop):
    _stop_is_due = False

    def advance(self, data_fetcher: Any) -> None:
        # Before the fetch, not after the step: so the last step's checkpoint and validation see the network that was
        # trained, and a resume from it still switches. A resume may first owe the rest of a validation.
        owes_validation = self.val_loop.restarted_mid_evaluation or self.restarted_on_last
        if not (self.restarting and self._should_check_val_fx(data_fetcher) and owes_validation):
            assert isinstance(self.trainer.fit_loop, VCycleLoop)
            self.trainer.fit_loop.finish_phases()
        super().advance(data_fetcher)

    def on_advance_end(self, data_fetcher: Any) -> None:
        loop = self.trainer.fit_loop
        assert isinstance(loop, VCycleLoop)
        self._finish_step_before_a_stop(loop.in_window)
        super().on_advance_end(data_fetcher)
        self._finish_step_before_a_stop(loop.in_window)
        if loop.in_window or self.global_step >= self.max_steps:
            return
        signum = loop.interruption.agreed(self.trainer)
        if signum:
            self.trainer.should_stop = True  # only now: a stop brings a validation, for which a signal leaves no time
        # A resume counts a step that ended in a validation again, as Lightning's own saves come before the count.
        validated = self._validates_when_resumed(data_fetcher)
        self._batches_that_stepped -= validated
        loop.step_done()
        self._batches_that_stepped += validated
        if signum and signum == loop.interruption.requeue:
            loop.requeue()

    def _finish_step_before_a_stop(self, in_window: bool) -> None:
        """Whoever asks for a stop inside an accumulation window gets it at the window's end."""
        asked = self._stop_is_due or self.trainer.should_stop
        self._stop_is_due, self.trainer.should_stop = asked and in_window, asked and not in_window

    def _broadcast_sigterm_tensor(self) -> None:
        """Where Lightning's processes agree to stop before a batch; ours agree after a step."""

    def _validates_when_resumed(self, data_fetcher: Any) -> bool:
        """Whether a validation is due at this batch; a stop brings one too, but a resume no longer knows of it."""
        stops, self.trainer.should_stop = self.trainer.should_stop, False
        due = self._should_check_val_fx(data_fetcher)
        self.trainer.should_stop = stops
        return due


class _Signals(_SignalConnector):
    """While a fit, a validation or a test runs, signals are the loop's to note."""

    def register_signal_handlers(self) -> None:
        self.received_sigterm = False
        self.trainer.fit_loop.interruption.install()

    def teardown(self) -> None:
        self.trainer.fit_loop.interruption.restore()


class StepSeed(pl.Callback):
    """The noise of a micro-batch (dropout, drop path, mixup) depends on (seed, its number, rank) and on nothing else.

    So nothing that validation, a loader or a transition draws can shift it, and a resume needs no RNG state, which
    Lightning does not save. Runs after the fetch: a loader's first fetch draws a seed from the global generator.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        seed = (self.seed * 1_000_003 + trainer.fit_loop.total_batch_idx) * 65_537 + trainer.global_rank
        torch.default_generator.manual_seed(seed % 2**63)  # torch.manual_seed walks all back ends: 0.2 ms
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed % 2**63)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def _refuse(trainer: pl.Trainer) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging)):
            raise ConfigError(
                f"{type(callback).__name__} averages the weights of one network over all steps, "
                "but the network changes size between phases; take it out of `callbacks`"
            )
    if trainer.overfit_batches:
        raise ConfigError("overfit_batches replaces the order of the data; train on few images instead (debug=overfit)")
    if not isinstance(trainer.strategy, (SingleDeviceStrategy, DDPStrategy, FSDP2)):
        raise ConfigError(
            f"{type(trainer.strategy).__name__} is not supported: the network changes size between phases; use "
            "trainer.strategy=auto or ddp, or trainer=fsdp2, which splits the weights over the processes"
        )


def _rank_in_last_phase(callback: EarlyStopping | ModelCheckpoint, module: LevelModule) -> None:
    """Levels are not comparable, so what monitors a metric sleeps until it is measured in the last phase."""
    if module.logged and callback.monitor not in module.logged:
        raise ConfigError(
            f"{type(callback).__name__} monitors {callback.monitor!r}, which is not logged; there are {module.logged}"
        )
    measured = not str(callback.monitor).startswith("val/")

    def guarded(name: str, hook: Any) -> Any:
        def awake(*args: Any, **kwargs: Any) -> None:
            nonlocal measured
            if module.phase_index == len(module.plan.phases) - 1:
                measured = measured or name == "on_validation_end"
                if measured:
                    hook(*args, **kwargs)

        return awake

    for name in ("on_train_batch_end", "on_train_epoch_end", "on_validation_end"):
        setattr(callback, name, guarded(name, getattr(callback, name)))


def _accumulating(state: dict[str, Any], accumulate: int) -> dict[str, Any]:
    """The loop state of a run that accumulated another number of batches in a step: Lightning counts batches."""
    before = state.get("state_dict", {}).get("accumulate", accumulate)
    if before == accumulate:
        return state
    state = copy.deepcopy(state)
    progress = state["epoch_loop.batch_progress"]
    if progress["current"]["ready"] % before:
        raise ConfigError(
            f"the checkpoint was saved inside a step of {before} accumulated batches, and this run accumulates "
            f"{accumulate}: go on from last.ckpt, which is saved between steps"
        )
    for counts in (progress["total"], progress["current"]):
        counts |= {name: count * accumulate // before for name, count in counts.items()}
    return state


def _start_of_next_epoch(state: dict[str, Any]) -> dict[str, Any]:
    """The loop state of a checkpoint written at the last batch of an epoch, rewritten as "between two epochs".

    Lightning 2.6 restores an exhausted loader there, or counts the epoch twice, and skips a whole epoch of data.
    """
    state = copy.deepcopy(state)
    state["state_dict"].pop("combined_loader", None)
    epoch = state["epoch_progress"]
    epoch["total"] = dict.fromkeys(epoch["total"], epoch["total"]["started"])
    epoch["current"] = dict.fromkeys(epoch["current"], epoch["current"]["started"])
    for key, value in state.items():
        if (
            key.startswith("epoch_loop.")
            and not key.startswith("epoch_loop.val_loop.")
            and not key.endswith("state_dict")
        ):
            _close(value)
    state["epoch_loop.batch_progress"]["is_last_batch"] = False
    steps = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = steps
    return state


def _close(progress: dict[str, Any]) -> None:
    """Progress counters: everything begun is completed, and nothing is under way."""
    if "total" in progress and "current" in progress:
        done = max(progress["total"].get("processed", 0), progress["total"]["completed"])
        progress["total"] = dict.fromkeys(progress["total"], done)
        progress["current"] = dict.fromkeys(progress["current"], 0)
        return
    for value in progress.values():
        if isinstance(value, dict):
            _close(value)
