"""How a run stands is in its folder, which is its own while it runs."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from test_train import config_of

from mlframe import run_folder, status
from mlframe.data.image import ImageData
from mlframe.errors import ConfigError, Diverged
from mlframe.interruption import end_with_parent
from mlframe.status import Status
from mlframe.train import train


class Break(pl.Callback):
    """Raises in step 6."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("the power\nis gone")


class Rival(pl.Callback):
    """Tries to work in a folder where a run trains."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        now = status.of(self.folder)
        rival = run_folder.held(self.folder, wait=0)
        with pytest.raises(ConfigError, match=r"another run \(pid \d+, host .+\) works in .*name=") as error, rival:
            pass
        (self.folder / "rival.txt").write_text(f"{now} {error.value}")


def of(folder: Path) -> tuple[str, str, int | None]:
    text = json.loads((folder / "status.json").read_text())
    assert set(text) == {"status", "reason", "step"}
    return text["status"], text["reason"], text["step"]


def test_a_run_is_running_alone_in_its_folder_then_stopped_then_finished(image_set: Path, tmp_path: Path) -> None:
    train(config_of(image_set, tmp_path, "trainer.max_time={seconds: 0}"))
    assert of(tmp_path) == ("stopped", "before its last step", 0)
    config = config_of(
        image_set, tmp_path, "+callbacks.rival._target_=test_status.Rival", f"+callbacks.rival.folder={tmp_path}",
        "resume=never",
    )  # fmt: skip
    train(config)
    assert of(tmp_path) == ("finished", "", 20)
    assert "status='running'" in (tmp_path / "rival.txt").read_text()
    with run_folder.held(tmp_path):  # a finished run only says so, and needs no lock
        config.resume = "auto"
        assert train(config)["steps"] == 20
    assert not (tmp_path / ".lock.by").exists()


def test_a_run_that_breaks_says_why_and_where_and_can_go_on(image_set: Path, tmp_path: Path) -> None:
    breaks = "+callbacks.breaks._target_=test_status.Break"
    with pytest.raises(RuntimeError, match="the power"):
        train(config_of(image_set, tmp_path, breaks))
    assert of(tmp_path) == ("failed", "RuntimeError: the power is gone", 5)
    assert "in on_train_batch_start" in (tmp_path / "error.log").read_text()
    ended = status.attempt(train, config_of(image_set, tmp_path, breaks, "resume=never"))
    assert (ended, status.exit_code(ended)) == (Status("failed", "RuntimeError: the power is gone", 5), 1)


def test_the_line_names_the_log_and_what_is_wrong_needs_none(
    image_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status.attempt(train, config_of(image_set, tmp_path / "a", "+callbacks.breaks._target_=test_status.Break"))
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        f"mlframe-train: RuntimeError: the power is gone (the traceback is in {tmp_path / 'a' / 'error.log'})"
    )
    (tmp_path / "b").mkdir()  # as Hydra does
    ended = status.attempt(train, config_of(image_set, tmp_path / "b", "model.config.num_heads=3"))
    assert capsys.readouterr().err == f"mlframe-train: {ended.reason}\n"
    assert of(tmp_path / "b") == ("failed", ended.reason, None)
    assert not (tmp_path / "b" / "error.log").exists()


def test_a_run_that_diverges_stops_early_and_leaves_no_network(image_set: Path, tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="diverged: train/loss is nan at step ") as error:
        train(config_of(image_set, tmp_path, "optimizer.lr=1e30", "plan=scratch", "schedule.warmup=0"))
    assert of(tmp_path) == ("diverged", str(error.value), error.value.step)
    assert error.value.step < 5
    assert "learning rate 9.94e+29" in str(error.value)
    assert not (tmp_path / "final").exists()
    assert not (tmp_path / "results.json").exists()
    assert status.exit_code(status.caused(error.value)) == 1


def test_a_signal_while_data_is_read_is_a_stop_that_leaves_nothing(
    image_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def setup(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ImageData, "setup", setup)
    ended = status.attempt(train, config_of(image_set, tmp_path / "run"))
    assert (ended.status, status.exit_code(ended)) == ("stopped", 143)
    assert "Stopped by SIGTERM" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_full_disk_and_a_torn_status_hide_nothing(
    image_set: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "status.json").write_text("")
    assert status.of(tmp_path) is None
    write = status.write

    def full(path: Path, now: Status) -> None:
        if now.status == "failed":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, now)

    monkeypatch.setattr(status, "write", full)
    ended = status.attempt(train, config_of(image_set, tmp_path, "model.config.num_heads=3"))
    assert ended.reason.startswith("model.config.num_heads=3 does not divide")


def test_a_process_whose_parent_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1, started by a process that is gone two seconds later."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork():
            time.sleep(2)
            os._exit(0)
        monkeypatch.setattr(rank_zero_only, "rank", 1)
        end_with_parent()
        time.sleep(12)
        os.write(writer, b"alive")
        os._exit(0)
    os.close(writer)
    os.waitpid(parent, 0)
    assert os.read(reader, 5) == b"", "it ended, and has written nothing"


def test_signals_are_a_stop_and_a_worker_s_traceback_is_not_a_reason() -> None:
    exits = SystemExit(1)
    exits.__context__ = KeyboardInterrupt()  # as Lightning exits
    assert status.caused(exits, 7) == Status("stopped", "SIGINT", 7)
    assert status.exit_code(Status("stopped", "SIGINT")) == 130
    assert status.exit_code(Status("stopped", "SIGTERM")) == 143
    assert status.exit_code(Status("stopped", "before its last step")) == 0
    sent = ConfigError("Caught it in worker 0.\nTraceback (most recent call last):\n  ...\nx.png is no image")
    assert status.caused(sent).reason == "x.png is no image"
