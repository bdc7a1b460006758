"""`mlframe-train -m` as a user runs it: what becomes of the other jobs, of the exit code and of what is left."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from fresh_box import Box
from test_wandb import records

from mlframe.sweep import _write_csv

HEADS = "model.config.num_heads"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory, image_set: Path) -> Box:
    box = Box(tmp_path_factory.mktemp("sweeps"), Path("images"))  # a short name, as it is a part of each job's
    (box.folder / "images").symlink_to(image_set)
    return box


def rows_of(sweep: Path) -> list[dict[str, str]]:
    with (sweep / "status.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert not list(sweep.glob(".sweep-*")), "the journal is gone"
    assert not list(sweep.glob("*/.job-*")), "and so is what a job was told"
    return rows


def with_heads(sweep: Path, heads: int) -> Path:
    return next(sweep.glob(f"*{HEADS}={heads}*"))


def tracked(run: Path) -> tuple[int, dict[str, str]]:
    """The exit code and the configuration of a job's W&B run."""
    found = records(run)
    config = {item.key: item.value_json for x in found if x.HasField("config") for item in x.config.update}
    return next(record.exit.exit_code for record in found if record.HasField("exit")), config


def test_a_failing_job_does_not_stop_the_others_and_the_same_command_goes_on(box: Box) -> None:
    command = box.smoke("name=heads", "steps=4", f"{HEADS}=4,3,2")
    sweep = box.folder / "runs" / "heads"
    done = box.run("-m", *command)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert not (box.folder / "connections.txt").exists()
    reason = "model.config.num_heads=3 does not divide the width, embed_dim=64; choose a factor of it"
    rows = rows_of(sweep)
    assert [(row["status"], row["reason"], row["step"]) for row in rows] == [
        ("finished", "", "4"), ("failed", reason, ""), ("finished", "", "4"),
    ]  # fmt: skip
    assert [sweep / row["job"] for row in rows] == [with_heads(sweep, heads) for heads in (4, 3, 2)]
    assert all(f"{HEADS}={heads}" in row["overrides"] for heads, row in zip((4, 3, 2), rows, strict=True))
    results = json.loads((with_heads(sweep, 4) / "results.json").read_text())
    table = done.stdout.strip().splitlines()[-5:]
    assert rows[0]["job"] in table[0]
    assert f"{results['test/acc']:.4f}" in table[0]
    assert rows[1]["job"] in table[1]
    assert reason in table[1]
    assert table[-1] == f"3 jobs, in {sweep / 'status.csv'}"

    # Three runs in W&B, one of them failed, each with its own configuration.
    runs = {heads: tracked(with_heads(sweep, heads)) for heads in (4, 3, 2)}
    assert {heads: code for heads, (code, _) in runs.items()} == {4: 0, 3: 1, 2: 0}
    for heads, (_, config) in runs.items():
        assert json.loads(config["model"])["config"]["num_heads"] == heads
    ids = {heads: (with_heads(sweep, heads) / "wandb_run_id").read_text() for heads in (4, 3, 2)}
    assert len(set(ids.values())) == 3

    # Again: one is skipped, one is tried again, and one that did not finish goes on, also in W&B.
    (with_heads(sweep, 2) / "results.json").unlink()
    again = box.run("-m", *command)
    assert again.returncode == 1
    assert [(row["job"], row["status"]) for row in rows_of(sweep)] == [(row["job"], row["status"]) for row in rows]
    assert f"{with_heads(sweep, 4)} is finished" in again.stdout
    assert f"Going on from {with_heads(sweep, 2) / 'checkpoints' / 'last.ckpt'}" in again.stdout
    assert again.stdout.count("steps of 16 samples") == 1, "one job trained"
    assert {h: len(list(with_heads(sweep, h).glob(f"wandb/offline-run-*-{ids[h]}"))) for h in ids} == {4: 1, 3: 2, 2: 2}


def test_fail_fast_starts_no_more(box: Box) -> None:
    done = box.run("-m", *box.smoke("name=fast", "steps=2", "logger=none", f"{HEADS}=3,4", "fail_fast=true"))
    assert done.returncode == 1
    sweep = box.folder / "runs" / "fast"
    rows = rows_of(sweep)
    assert [row["status"] for row in rows] == ["failed", "not started"]
    assert "fail_fast=true" in rows[1]["reason"]
    assert not list(sweep.glob("*/metrics.csv"))


def test_the_rows_of_another_command_stay_and_a_job_s_last_end_counts(tmp_path: Path) -> None:
    def entry(number: int, job: str, status: str) -> str:
        end = {"status": status, "reason": "", "step": 1, "overrides": job}
        return json.dumps({"number": number, "job": job, **end}) + "\n"

    (tmp_path / ".sweep-a.jsonl").write_text(entry(0, "seed=1", "failed") + entry(1, "seed=2", "finished"))
    _write_csv(tmp_path / ".sweep-a.jsonl")
    (tmp_path / ".sweep-b.jsonl").write_text(entry(1, "seed=1", "stopped") + entry(0, "seed=3", "failed"))
    _write_csv(tmp_path / ".sweep-b.jsonl")
    with (tmp_path / "status.csv").open() as file:
        rows = [(row["job"], row["status"]) for row in csv.DictReader(file)]
    assert rows == [("seed=2", "finished"), ("seed=3", "failed"), ("seed=1", "stopped")]


def test_two_processes_a_job_are_one_folder_a_job(box: Box) -> None:
    ddp = ["trainer.strategy=ddp", "trainer.devices=2", "trainer.accelerator=cpu", "data.batch_size=8"]
    done = box.run("-m", *box.smoke("name=ddp", "steps=4", "seed=1,2", *ddp))
    assert done.returncode == 0, done.stderr
    sweep = box.folder / "runs" / "ddp"
    assert [path.name for path in (box.folder / "runs").iterdir() if "ddp" in path.name] == ["ddp"]
    assert [row["status"] for row in rows_of(sweep)] == ["finished", "finished"]
    runs = [path for path in sweep.iterdir() if path.is_dir()]
    assert sorted(yaml.safe_load((run / "config.yaml").read_text())["seed"] for run in runs) == [1, 2]
    for run in runs:
        results = json.loads((run / "results.json").read_text())
        assert (results["steps"], results["images"]) == (4, 4 * 8 * 2)
        assert len(list(run.glob("wandb/offline-run-*"))) == 1
    assert done.stdout.count("steps of 16 samples") == 2, "each job trained once"


def test_jobs_in_parallel_share_the_table_and_a_failure(box: Box) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    joblib = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "logger=none"]
    done = box.run("-m", *box.smoke("name=joblib", "steps=2", f"{HEADS}=3,4", *joblib))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert [row["status"] for row in rows_of(box.folder / "runs" / "joblib")] == ["failed", "finished"]


def test_a_search_goes_on_past_a_trial_that_diverges(box: Box) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    search = ["hparams_search=optuna", "hydra.sweeper.n_trials=2", "hydra/sweeper/sampler=random",
              "hydra.sweeper.sampler.seed=1", "optimizer.lr=choice(1e-3,1e30,2e-3)"]  # fmt: skip
    command = box.smoke("name=search", "steps=6", "plan=scratch", "logger=none", *search)
    done = box.run("-m", *command)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    sweep = box.folder / "runs" / "search"
    rows = rows_of(sweep)
    assert [row["status"] for row in rows] == ["diverged", "finished"]
    assert rows[0]["reason"].startswith("diverged: train/loss is nan at step 2 of 6")
    assert rows[0]["step"] == "2"
    assert not (sweep / rows[0]["job"] / "final").exists()
    best = yaml.safe_load((sweep / "optimization_results.yaml").read_text())
    losses = [json.loads(path.read_text())["val/loss"] for path in sweep.glob("*/results.json")]
    assert best["best_value"] == min(losses)


@pytest.fixture
def started(box: Box) -> Iterator[subprocess.Popen[str]]:
    """A sweep of two long jobs."""
    command = [sys.executable, "-m", "mlframe.train", "-m"]
    long = ["name=killed", "steps=20000", "seed=1,2", "logger=none", "trainer.val_check_interval=10000"]
    process = subprocess.Popen(
        [*command, *box.smoke(*long)], cwd=box.folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**box.env, "PYTHONPATH": os.pathsep.join(box.path)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    yield process
    process.kill()


def wait_for_rows(sweep: Path, seed: int) -> Path:
    for _ in range(1200):
        if found := list(sweep.glob(f"*seed={seed}*/metrics.csv")):
            return found[0].parent
        time.sleep(0.1)
    raise AssertionError("no row in two minutes")


def test_a_job_that_is_killed_and_a_sweep_that_is_told_to_stop(box: Box, started: subprocess.Popen[str]) -> None:
    sweep = box.folder / "runs" / "killed"
    first = wait_for_rows(sweep, 1)
    os.kill(int((first / ".lock.by").read_text().split()[1].rstrip(",")), signal.SIGKILL)
    wait_for_rows(sweep, 2)
    started.send_signal(signal.SIGTERM)
    stdout, stderr = started.communicate(timeout=120)
    assert started.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in stderr
    rows = rows_of(sweep)
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("failed", "killed by signal 9 (SIGKILL); out of memory?"), ("stopped", "SIGTERM"),
    ]  # fmt: skip
    assert (sweep / rows[1]["job"] / "checkpoints" / "last.ckpt").exists(), "saved at the end of its step"
    said = [json.loads((sweep / row["job"] / "status.json").read_text())["status"] for row in rows]
    assert said == ["failed", "stopped"]
    assert "killed by signal 9" in stdout
