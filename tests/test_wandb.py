"""W&B: which mode, and what its offline file holds."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from small_fit import TWO, fit
from wandb.proto import wandb_internal_pb2

from mlframe.errors import ConfigError
from mlframe.plan import vcycle
from mlframe.wandb_logger import finish, wandb_logger


@pytest.fixture(autouse=True)
def no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    yield
    finish(failed=False)


def records(folder: Path) -> list[wandb_internal_pb2.Record]:
    """The records of an offline run's file: LevelDB's log format after 7 bytes, chunks inside blocks of 32 KiB."""
    data = next(folder.glob("wandb/offline-run-*/*.wandb")).read_bytes()
    found, whole, at = [], b"", 7
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            found.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return found


def test_every_row_carries_its_flops_which_are_the_axis(tmp_path: Path) -> None:
    plan = vcycle(TWO, 6, 1, 3, 0.5)
    fit(plan, logger=wandb_logger(project="test", dir=str(tmp_path)), val_check_interval=2)
    finish(failed=False)
    for _ in range(40):  # W&B's own process writes the file, and says with a record when it is done
        found = records(tmp_path)
        if any(record.HasField("exit") for record in found):
            break
        time.sleep(0.25)
    rows = [{item.nested_key[0] if item.nested_key else item.key: item.value_json for item in record.history.item}
            for record in found if record.HasField("history")]  # fmt: skip
    measured = [row for row in rows if any(key.startswith(("train/", "val/")) for key in row)]
    kinds = [record.WhichOneof("record_type") for record in found]
    assert len(measured) == 9, f"6 training rows and 3 validations, of {kinds}"
    assert all("total_flops" in row and "images" in row and "wall_time" in row for row in measured)
    assert max(int(row["total_flops"]) for row in measured) == plan.flops(4)
    axes = {record.metric.glob_name: record.metric.step_metric for record in found if record.HasField("metric")}
    assert {axes[group] for group in ("train/*", "val/*", "test/*")} == {"total_flops"}


@pytest.mark.parametrize(
    ("asked", "variable", "offline"), [("auto", "disabled", None), ("offline", None, True), ("auto", None, True)]
)
def test_the_mode(
    asked: str, variable: str | None, offline: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv("WANDB_MODE", variable)
    run = wandb_logger(mode=asked, project="test", dir=str(tmp_path)).experiment  # type: ignore[arg-type]
    assert run.disabled if offline is None else run.offline
    assert wandb.run is run


def test_online_without_a_key_and_no_mode_at_all_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"WANDB_API_KEY.*logger\.wandb\.mode=offline"):
        wandb_logger(mode="online", project="test", dir=str(tmp_path))
    with pytest.raises(ConfigError, match=r"logger\.wandb\.mode=on: one of"):
        wandb_logger(mode="on", project="test", dir=str(tmp_path))  # type: ignore[arg-type]
    assert not list(tmp_path.glob("wandb"))
