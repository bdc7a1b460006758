"""SIGTERM, SIGINT and SLURM's signal in the middle of training: the step is finished and saved, nothing else begins."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from small_fit import Indexed, fit, loader, same, weights
from torch.utils.data import DataLoader

from mlframe.checkpoint import LastCheckpoint
from mlframe.errors import Interrupted
from mlframe.interruption import Interruption
from mlframe.rows import Rows, read_rows


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Tests that are started by nohup, or with &, inherit that signals are ignored."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL, signal.SIGTERM: signal.SIG_DFL}
    before = {signum: signal.signal(signum, handler) for signum, handler in usual.items()}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class Send(pl.Callback):
    """Sends this process signals in the training batch of that number (from 0)."""

    def __init__(self, batch: int, *signals: int) -> None:
        self.batch, self.signals = batch, signals

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == self.batch:
            self.send()

    def send(self) -> None:
        for signum in self.signals:
            os.kill(os.getpid(), signum)


class SendInValidation(Send):
    """The same in the sanity check, or in an evaluation after training."""

    def __init__(self, sanity_check: bool, *signals: int) -> None:
        super().__init__(-1, *signals)
        self.sanity_check = sanity_check

    def on_validation_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.sanity_checking if self.sanity_check else trainer.state.fn == "validate":
            self.send()


HALF: dict[str, Any] = {"accumulate_grad_batches": 2, "val_check_interval": 1000}
SAVES: dict[str, Any] = {"enable_checkpointing": True}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
@pytest.mark.parametrize(("batch", "step", "phase"), [(0, 1, 0), (9, 5, 0), (12, 7, 1)])
def test_a_signal_ends_training_with_the_step_saved(
    signum: int, batch: int, step: int, phase: int, tmp_path: Path
) -> None:
    """In the first half of a step, and in the last step of a phase: the next phase does not begin."""
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    last = LastCheckpoint(tmp_path, every=1000)
    module, trainer = fit(callbacks=(Send(batch, signum), last), logger=Rows(tmp_path), **HALF, **SAVES)
    assert (trainer.global_step, module.phase_index) == (step, phase)
    assert len(module.seen) == 2 * step
    assert trainer.fit_loop.interruption.signum == signum
    assert not [row for row in read_rows(tmp_path / "metrics.csv") if row.get("val/loss")], "no time for a validation"
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == step
    assert handlers == [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)], "put back"
    resumed, _ = fit(ckpt=tmp_path / "last.ckpt", **HALF)
    assert same(weights(resumed), weights(fit(**HALF)[0]))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_a_signal_ends_the_sanity_check_and_a_last_evaluation(signum: int) -> None:
    with pytest.raises(Interrupted, match=signum.name):
        fit(callbacks=(SendInValidation(True, signum),))
    module, trainer = fit(callbacks=(SendInValidation(False, signum),))
    assert trainer.global_step == 26
    with pytest.raises(Interrupted, match=signum.name):
        trainer.validate(module, DataLoader(Indexed(16), batch_size=8))


def test_before_a_fit_a_signal_ends_all_at_once_and_one_that_is_ignored_stays_so() -> None:
    interruption, before = Interruption(), signal.getsignal(signal.SIGTERM)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with interruption:
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(Interrupted, match="SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, ignored)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_sigint_ends_at_once(tmp_path: Path) -> None:
    last = LastCheckpoint(tmp_path, every=3)
    with pytest.raises(SystemExit):  # Lightning's, for a KeyboardInterrupt
        fit(callbacks=(Send(8, signal.SIGINT, signal.SIGINT), last), **SAVES)
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 6


def test_slurm_requeues_the_job_after_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Lightning, which calls scontrol; that one here writes down its arguments."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {"NTASKS": 1, "JOB_ID": 4242, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_NAME": "x"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    last = LastCheckpoint(tmp_path, every=1000)
    send = Send(11, signal.SIGUSR1)
    _, trainer = fit(callbacks=(send, last), default_root_dir=tmp_path, **SAVES)
    assert trainer.global_step == 12
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 12
    assert (tmp_path / "called").read_text() == "requeue 4242\n"
    resumed, _ = fit(ckpt=tmp_path / "last.ckpt", train=loader())
    assert same(weights(resumed), weights(fit()[0]))
