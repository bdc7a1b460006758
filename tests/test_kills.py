"""SIGKILL at the moments that matter, and a resume that ends as if nothing had been; benchmarks/chaos.py does more."""

from __future__ import annotations

import shutil
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from kills import PART_FILE, Case, Kill
from moments import MOMENTS
from same_run import differences

from mlframe.checkpoint import AtomicCheckpointIO


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("deit", "accumulated", tmp_path_factory.mktemp("deit"))


def survives(case: Case, name: str, *kills: Kill) -> None:
    deaths = case.endure(name, deque(kills))
    assert [death.moment for death in deaths] == [kill.moment for kill in kills], "each of them met the run"
    assert not [death for death in deaths if death.lost]


def test_deit_survives_torn_checkpoints_kills_without_progress_and_one_in_a_transition(case: Case) -> None:
    torn = [Kill("a checkpoint is torn", 2, 0.01), Kill("a checkpoint is torn", 1, 0.99)]
    survives(case, "torn", *torn, *[Kill("all is built")] * 2, Kill("interpolate"))
    assert set(case.counts) == set(MOMENTS), "a run comes by every moment"


def test_a_kill_in_the_first_accumulation_window_after_a_resume_is_survived(case: Case) -> None:
    """The resume must not save what half a window did."""
    survives(case, "window", Kill("last.ckpt is replaced", 3), Kill("before the optimizer steps"))


def test_bert_survives_kills_around_the_next_weights_a_rename_and_the_end(tmp_path: Path) -> None:
    kills = Kill("the next weights are there"), Kill("last.ckpt is written", 3), Kill("results.json is written")
    survives(Case("bert", "plain", tmp_path), "killed", *kills)


def test_gpt_survives_kills_between_rows_and_checkpoint_in_levels_and_from_outside(tmp_path: Path) -> None:
    kills = Kill("rows are there, no checkpoint", 5), Kill("levels/k is written"), Kill(PART_FILE, share=0.1)
    survives(Case("gpt", "accumulated", tmp_path), "killed", *kills)


def write_in_place() -> None:
    def save(self: Any, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("wb") as file:
            torch.save(checkpoint, file)

    AtomicCheckpointIO.save_checkpoint = save  # type: ignore[method-assign]


def test_a_writer_that_is_not_atomic_is_found_out(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case, "prepare", write_in_place)
    (death,) = case.endure("broken", deque([Kill("a checkpoint is torn", 3)]))
    assert "last.ckpt cannot be read" in death.lost


def test_a_lost_row_and_a_changed_weight_are_found_out(case: Case, tmp_path: Path) -> None:
    run = case.folder / "changed"
    run.mkdir()
    for path in case.whole.iterdir():
        if path.name != "data":
            (shutil.copytree if path.is_dir() else shutil.copy)(path, run / path.name)
    rows = (run / "metrics.csv").read_text().splitlines(keepends=True)
    (run / "metrics.csv").write_text("".join(rows[:5] + rows[6:]))
    weights = run / "final" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    found = "\n".join(differences(case.whole, run))
    assert "metrics.csv: " in found
    assert "final/model.safetensors is another" in found
