"""What two run folders do not share, but for the clock and their own names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mlframe.rows import read_rows

_CLOCK = ("seconds", "wall_time")
# What a process keeps of its last validation: a resume begins without, and the next validation sets it.
_LAST_VALIDATION = ("epoch_loop.val_loop.batch_progress", "current_score")


def differences(a: Path, b: Path) -> list[str]:
    """One line for each file of `b` that is not to the bit what it is in `a`."""
    out = []
    for name in sorted(_networks(a) | _networks(b)):
        if _bytes(a / name) != _bytes(b / name):
            out.append(f"{name} is another, or not there")
    for name, read in _FILES.items():
        if not all((run / name).exists() for run in (a, b)):
            out.append(f"{name} is not there")
            continue
        mine, other = (dict(_leaves(read(run / name), str(run))) for run in (a, b))
        if differing := [key for key in {**mine, **other} if mine.get(key) != other.get(key)]:
            was, now = (f"{values.get(differing[0])}"[:60] for values in (mine, other))
            out.append(f"{name}: {len(differing)} differ, {differing[0]} was {was} and is {now}")
    return out


_FILES = {
    "metrics.csv": read_rows,
    "results.json": lambda path: json.loads(path.read_text()),
    "plan.json": lambda path: json.loads(path.read_text()),
    "config.yaml": lambda path: path.read_text(),
    "checkpoints/last.ckpt": torch.load,
    "checkpoints/best.ckpt": torch.load,
}


def _networks(run: Path) -> set[str]:
    return {
        str(path.relative_to(run)) for part in ("final", "levels") for path in (run / part).rglob("*") if path.is_file()
    }


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _leaves(value: Any, run: str, at: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, below in items:
            if key not in _CLOCK + _LAST_VALIDATION:
                yield from _leaves(below, run, f"{at}/{key}".replace(run, ""))
        yield at, (type(value).__name__, len(value))
    elif isinstance(value, torch.Tensor):
        yield at, (value.dtype, tuple(value.shape), value.contiguous().view(-1).numpy().tobytes())
    else:
        yield at, value.replace(run, "") if isinstance(value, str) else repr(value)
