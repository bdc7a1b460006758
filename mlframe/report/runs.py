"""Run folders, read: what was run, how it stands, what it reached, and its rows."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from pyarrow import ArrowInvalid
from pyarrow import csv as arrow_csv

from mlframe import run_folder
from mlframe.errors import ConfigError

CHOICE = "val/loss"
"""The final metric by which a rate is chosen. A run without it is not compared."""

COSTS = ("total_flops", "tokens", "images", "samples", "wall_time")

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where PyYAML has libyaml


@dataclass(frozen=True, eq=False)
class Run:
    """A run folder. `config` is flat, with values as JSON text: {"plan.alpha": "0.25"}.

    status: as in status.json, or unreadable, not started (a job of a sweep) or repeated. Only finished ones compare.
    """

    folder: str
    status: str
    reason: str = ""
    step: int | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def phases(self) -> list[dict[str, Any]]:
        """Those that take steps."""
        return [phase for phase in self.plan.get("phases", []) if phase["steps"]]

    @property
    def alone(self) -> bool:
        """One level alone: scratch at level 0, the control of a method at another."""
        return len({phase["level"] for phase in self.phases}) == 1

    @property
    def steps(self) -> int | None:
        return self.plan.get("steps")

    @property
    def rate(self) -> float | None:
        return _number(self.config.get("optimizer.lr"))

    @property
    def seed(self) -> int | None:
        seed = _number(self.config.get("seed"))
        return None if seed is None else int(seed)

    @property
    def unit(self) -> str:
        return next((unit for unit in ("tokens", "images", "samples") if unit in self.results), "samples")


def _number(text: str | None) -> float | None:
    try:
        return float(json.loads(text or ""))
    except (ValueError, TypeError):
        return None


def read_all(paths: Sequence[str | Path]) -> list[Run]:
    """Every run at or below `paths`, each folder once, sorted by folder; and the jobs of sweeps that left no folder.

    Raises ConfigError where a path is no folder, or where there is no run.
    """
    folders: dict[Path, Path] = {}
    sweeps: dict[Path, Path] = {}
    for top in paths:
        if not Path(top).is_dir():
            raise ConfigError(f"{top} is no folder: name run folders, or folders above them")
        for name, below, files in os.walk(top):
            folder = Path(name)
            if "config.yaml" in files or "status.json" in files:
                folders.setdefault(folder.resolve(), folder)
                below.clear()
            else:
                below[:] = sorted(other for other in below if not other.startswith("."))
                if "status.csv" in files:
                    sweeps.setdefault(folder.resolve(), folder)
    runs = [read(folder) for folder in folders.values()]
    for real, folder in sweeps.items():
        runs += [job for name, job in _jobs(folder) if (real / name).resolve() not in folders]
    if not runs:
        raise ConfigError(f"no run in {', '.join(map(str, paths))}: a run's folder has a config.yaml or a status.json")
    return sorted(runs, key=lambda run: run.folder)


def read(folder: Path) -> Run:
    """The run of a folder. What cannot be read is its status, never an error."""
    try:
        stands = _object(folder / "status.json")
        config = _config(folder / "config.yaml")
        results = run_folder.read_results(folder) or {}
        plan = _object(folder / "plan.json")
        run = Run(folder.as_posix(), "", config=config, plan=plan, results=results)
        _ = run.alone  # a damaged plan shows here
    except (ConfigError, OSError, KeyError, TypeError, AttributeError) as error:
        return Run(folder.as_posix(), "unreadable", " ".join(str(error).split()))
    status, reason = str(stands.get("status", "stopped")), str(stands.get("reason", ""))
    if status not in ("failed", "diverged"):
        status = "finished" if results else "stopped" if status == "finished" else status
        reason = "" if results else reason or "results.json is not there"
    if status == "finished":
        missing = [name for name, part in (("config.yaml", config), ("plan.json", run.phases)) if not part]
        value = results.get(CHOICE)
        if missing:
            status, reason = "unreadable", f"{missing[0]} is not there, or empty"
        elif not isinstance(value, int | float) or not math.isfinite(value):
            status, reason = "unreadable", f"results.json has no finite {CHOICE}"
        elif not min(results["total_flops"], results["wall_time"]) > 0:
            status, reason = "unreadable", "results.json has no cost above 0"
    return Run(folder.as_posix(), status, reason, stands.get("step"), config, plan, results)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; {} where there is no file."""
    if not path.exists():
        return {}
    try:
        read = json.loads(path.read_text())
    except ValueError:
        read = None
    if not isinstance(read, dict):
        raise ConfigError(f"{path.name} is damaged")
    return read


def _config(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        read = _Loader(path.read_text()).get_single_data()  # plain values only
    except (yaml.YAMLError, ValueError):
        read = None
    if not isinstance(read, dict):
        raise ConfigError(f"{path.name} is damaged")
    return dict(_flat(read))


def _flat(value: Any, key: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _flat(below, f"{key}.{name}".lstrip("."))
    else:
        yield key, json.dumps(value, sort_keys=True, default=str)


def _jobs(folder: Path) -> Iterable[tuple[str, Run]]:
    """The jobs of a sweep, by its status.csv: name of the folder, and the run as the sweep saw it."""
    with (folder / "status.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            name, step = row.get("job") or "", row.get("step") or ""
            stands = (row.get("status") or "unreadable", row.get("reason") or "")
            if name and stands[0] != "finished":  # a finished one whose folder is gone was taken away on purpose
                yield name, Run((folder / name).as_posix(), *stands, int(step) if step.isdigit() else None)


def rows(folder: str, columns: Iterable[str]) -> dict[str, NDArray[np.float64]]:
    """Columns of a run's metrics.csv, all rows of it; NaN where a row has no value, and no key where none has.

    As mlframe.rows.read_rows, a hundred times as fast: a last row that a kill cut off is left out, and so is one with
    another number of fields. Raises ConfigError where a value is no number.
    """
    path = Path(folder) / "metrics.csv"
    text = path.read_bytes() if path.exists() else b""
    text = text[: text.rfind(b"\n") + 1]
    header = next(csv.reader([text[: text.find(b"\n")].decode(errors="replace").strip()]), []) if text else []
    wanted = [name for name in dict.fromkeys(columns) if name in header]
    if not wanted:
        return {}
    convert = arrow_csv.ConvertOptions(column_types=dict.fromkeys(wanted, "float64"), include_columns=wanted)
    parse = arrow_csv.ParseOptions(invalid_row_handler=lambda row: "skip")
    read = arrow_csv.ReadOptions(use_threads=False)
    try:
        table = arrow_csv.read_csv(io.BytesIO(text), read, parse, convert)
    except ArrowInvalid as error:
        raise ConfigError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    return {name: table[name].to_numpy(zero_copy_only=False) for name in wanted if table[name].null_count < len(table)}
