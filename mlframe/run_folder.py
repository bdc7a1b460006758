"""What a run leaves in its folder.

config.yaml      the composed configuration, resolved
plan.json        the phases, with sizes and FLOPs
metrics.csv      every logged row (mlframe.rows)
checkpoints/     last.ckpt, where a resume goes on, and best.ckpt of the last phase
final/           the trained network in the form of its own library
levels/          the smaller levels' networks likewise, as they were left
results.json     written last: the run is finished
status.json      how the run stands: status, reason, step (mlframe.status); error.log, where it broke
wandb_run_id     the W&B run that a resume goes on in
.lock            held by the run that works here; .lock.by says which
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from mlframe.errors import ConfigError

if TYPE_CHECKING:  # the report reads folders without torch
    from mlframe.plan import Plan

_LEFT = ("results.json", "metrics.csv", "plan.json", "checkpoints", "levels", "final")

FREE = (
    "resume", "run_dir", "trainer.max_time", "data.workers", "logger", "callbacks.progress", "metric", "fail_fast",
    # Other processes may go on with a run, as long as a step has as many samples (`check_samples`).
    "trainer.devices", "trainer.num_nodes", "trainer.accelerator", "trainer.strategy",
    "trainer.accumulate_grad_batches", "data.batch_size", "trainer.val_check_interval",
)  # fmt: skip
"""May differ when a run goes on: they do not change what is computed."""


def check_same(folder: Path, config: DictConfig) -> None:
    """Raise ConfigError with the differing keys where the folder holds a run of another configuration."""
    path = folder / "config.yaml"
    if not path.exists():
        return
    try:
        old = OmegaConf.load(path)  # by YAML's safe loader; only compared, never instantiated
    except Exception:  # of YAML or OmegaConf
        old = None
    if not isinstance(old, DictConfig) or "run_dir" not in old:
        raise ConfigError(f"{path} is not a whole configuration: remove it, or begin the folder again (resume=never)")
    # The folder may have moved since, and paths in it with it.
    moved = OmegaConf.create(OmegaConf.to_yaml(old).replace(str(old.run_dir), str(config.run_dir)))
    differing = _differing(OmegaConf.to_container(moved), OmegaConf.to_container(config, resolve=True))
    if differing:
        raise ConfigError(
            f"{folder} holds a run with another configuration ({'; '.join(differing)}): "
            "name this one differently (name=...) or begin the folder again (resume=never)"
        )


def _differing(old: Any, new: Any, key: str = "") -> list[str]:
    """The keys below which two configurations differ."""
    if key in FREE:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        below = dict.fromkeys([*old, *new])
        return [line for k in below for line in _differing(old.get(k), new.get(k), f"{key}.{k}".lstrip("."))]
    return [] if old == new else [f"{key} was {old}, is {new}"]


@contextmanager
def held(folder: Path, wait: float = 10.0) -> Iterator[None]:
    """The folder is this run's alone. Raises ConfigError where another's still is after `wait` seconds.

    The system lets go of the lock of a process that is killed, once its data workers are gone too: hence the wait.
    """
    lock, by = FileLock(folder / ".lock"), folder / ".lock.by"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait)
    except Timeout:
        who = by.read_text() if by.exists() else "unknown"
        raise ConfigError(
            f"another run ({who}) works in {folder}: wait for it, or name this one differently (name=...)"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"run_dir={folder} is no folder that can be written ({error.strerror}): choose another run_dir"
        ) from error
    try:
        write(by, f"pid {os.getpid()}, host {socket.gethostname()}")
        yield
    finally:
        by.unlink(missing_ok=True)
        lock.release()


def begin(folder: Path, config: DictConfig) -> None:
    """Save the resolved configuration. resume=never first removes what an earlier run left in the folder."""
    if config.resume == "never":
        for name in _LEFT:
            (shutil.rmtree if (folder / name).is_dir() else _unlink)(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("hpc_ckpt_*"):  # Lightning's, of a requeued job: last.ckpt holds the same, and moves on
        (shutil.rmtree if path.is_dir() else _unlink)(path)
    write(folder / "config.yaml", OmegaConf.to_yaml(config, resolve=True))


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def check_room(folder: Path, plan: Plan) -> None:
    """Raise ConfigError where the folder's disk has no room for the plan's checkpoints."""
    free, needed = shutil.disk_usage(folder).free, 2 * plan.checkpoint_bytes
    if free < needed:
        raise ConfigError(f"run_dir={folder}: the disk has {free / 1e6:,.0f} MB free, and a checkpoint beside the one "
                          f"before it takes {needed / 1e6:,.0f} MB; make room, or choose another run_dir")  # fmt: skip


def write_plan(folder: Path, plan: Plan, samples_per_step: int) -> None:
    phases = []
    for phase in plan.phases:
        level = plan.levels[phase.level]
        phases.append(
            {
                "name": phase.name, "level": phase.level, "steps": phase.steps, "alpha": phase.alpha,
                "sizes": dict(level.sizes), "parameters": level.parameters, "flops_per_sample": level.flops,
                "flops": phase.steps * samples_per_step * level.flops,
                "merged_from_above": {axis: [list(group) for group in groups] for axis, groups in level.scheme.items()},
            }
        )  # fmt: skip
    whole = {
        "steps": plan.steps, "samples_per_step": samples_per_step, "flops": plan.flops(samples_per_step),
        "scratch_flops": plan.scratch_flops(samples_per_step), "new_layers": plan.new_layers,
        "split_noise": plan.split_noise, "phases": phases,
    }  # fmt: skip
    write(folder / "plan.json", json.dumps(whole, indent=1))


def write_results(folder: Path, results: dict[str, Any]) -> None:
    write(folder / "results.json", json.dumps(results, indent=1))


def read_results(folder: Path) -> dict[str, Any] | None:
    """The results of a finished run, or None. Raises ConfigError where the file is damaged."""
    path = folder / "results.json"
    if not path.exists():
        return None
    try:
        results = json.loads(path.read_text())
        whole = isinstance(results, dict) and {"levels", "total_flops", "share_of_scratch", "wall_time"} <= set(results)
    except ValueError:
        whole = False
    if not whole:
        raise ConfigError(f"{path} is damaged: remove it and run again (a finished run is only evaluated again)")
    return results


def write(path: Path, text: str) -> None:
    """The whole text or, where this process is killed, what was there before."""
    beside = path.with_name(f".{path.name}.part")
    with beside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
