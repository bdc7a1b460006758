"""Where a run begins: at its own last checkpoint, at that of another run, or anew. And that this can be."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mlframe.axes import check_nan
from mlframe.errors import ConfigError
from mlframe.module import peek
from mlframe.plan import Plan
from mlframe.sharding import recover


def starting_point(folder: Path, ckpt_path: str | None, auto: bool, plan: Plan, samples: int) -> Path | None:
    """The checkpoint that a run in `folder` goes on from, or None.

    auto: whether the folder's own last checkpoint counts, before `ckpt_path`.  samples: of a step, over all processes.
    Raises ConfigError where the checkpoint is damaged, or not of such a run.
    """
    last = folder / "checkpoints" / "last.ckpt"
    recover(last)
    if auto and last.exists():
        _check_samples(folder, samples)
        return _checked(last, plan, "remove it, or add resume=never")
    if ckpt_path is None:
        return None
    if not Path(ckpt_path).exists():
        raise ConfigError(f"ckpt_path: there is no checkpoint {ckpt_path}")
    return _checked(Path(ckpt_path), plan, "name another one (ckpt_path=...)")


def _check_samples(folder: Path, samples: int) -> None:
    path = folder / "plan.json"
    try:
        before = json.loads(path.read_text())["samples_per_step"] if path.exists() else samples
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged: remove it, and run again (it is written anew)") from error
    if before != samples:
        raise ConfigError(
            f"{folder} holds a run with {before} samples in a step, and this one has {samples}: change data.batch_size "
            "or trainer.accumulate_grad_batches so that batch size x accumulated batches x processes is the same"
        )


def _checked(path: Path, plan: Plan, instead: str) -> Path:
    """The path of a checkpoint that is whole, runs no code, holds no NaN and stands at a step of the plan."""
    try:
        if path.is_file():
            with zipfile.ZipFile(path) as entries:
                if (changed := entries.testzip()) is not None:
                    raise ConfigError(
                        f"{path} was changed after it was written (the checksum of {changed} differs): {instead}"
                    )
        state = peek(path)
    except ConfigError:
        raise
    except Exception as error:  # of zipfile or torch, some of many lines
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}): {instead}") from error
    try:
        phase, step, sizes = state["vcycle"]["phase"], state["global_step"], state["vcycle"]["sizes"]
        parked = state["vcycle"]["parked"]
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{path} is no checkpoint of a run: {instead}") from error
    _check_place(path, plan, phase, step, sizes, instead)
    if path.is_file():  # of a folder, the library that wrote it checks names and shapes
        _check_weights(path, plan, phase, state, parked, instead)
    return path


def _check_place(path: Path, plan: Plan, phase: int, step: int, there: Mapping[str, int], instead: str) -> None:
    phases = plan.phases
    if not 0 <= phase < len(phases) or not 0 <= step - plan.start(phase) <= phases[phase].steps:
        raise ConfigError(
            f"{path} stands at step {step} in phase {phase + 1}, which this plan does not have: {instead}"
        )
    here = plan.levels[phases[phase].level].sizes
    if differing := [axis for axis in {**there, **here} if there.get(axis) != here.get(axis)]:
        unlike = ", ".join(f"{axis} {there.get(axis)} and here {here.get(axis)}" for axis in differing)
        raise ConfigError(f"{path} is of a network of another shape ({unlike}): {instead}")


def _check_weights(
    path: Path, plan: Plan, phase: int, state: Mapping[str, Any], parked: Mapping[str, Any], instead: str
) -> None:
    prefix = "network."
    weights = {name.removeprefix(prefix): x for name, x in state["state_dict"].items() if name.startswith(prefix)}
    if _shapes(weights) != _shapes(plan.built(phase)):
        raise ConfigError(f"{path} is of another model or plan than this run's: {instead}")
    for tensors in (weights, *parked.values()):
        try:
            check_nan(path, tensors)
        except ValueError as error:
            raise ConfigError(
                f"{error}: training has diverged; begin again (resume=never) with a lower optimizer.lr or with "
                "trainer.gradient_clip_val"
            ) from error


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in state.items()}
