"""The course of training, for drawing: over the seeds of a budget the median, and the band from least to most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mlframe.report.methods import Method, Point, Task
from mlframe.report.runs import rows

DRAWN = 300
"""Points of a drawn line; every number is computed from all rows."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One method at one budget. `x`: cost -> values (the median of the seeds, as seeds differ in time alone).

    phase: of each point; a new one begins where the network changes its size. Arrays of one length.
    """

    method: int
    steps: int
    metric: str
    x: dict[str, Values]
    median: Values
    low: Values
    high: Values
    phase: Values


def axes(task: Task) -> tuple[str, ...]:
    """The costs that are drawn: FLOPs, tokens (or what the task's data is counted in), and seconds."""
    return "total_flops", task.unit, "wall_time"


def lines(task: Task) -> list[Line]:
    """Of every method, budget and validated metric of a task. One budget's rows are in memory at a time."""
    return [
        line
        for index, method in enumerate(task.methods)
        for point in method.points
        for line in _lines(task, index, method, point)
    ]


def _lines(task: Task, index: int, method: Method, point: Point) -> list[Line]:
    costs = axes(task)
    tables = [rows(run.folder, ("step", "phase", *costs, *task.metrics)) for run in point.runs]
    found = []
    for metric in task.metrics:
        seeds = [table for table in tables if {"step", metric, *costs} <= set(table)]
        parts = [_measured(table, metric) for table in seeds]
        if not parts:
            continue
        steps = parts[0]["step"]
        for part in parts[1:]:
            steps = np.intersect1d(steps, part["step"])
        aligned = [{k: v[np.searchsorted(part["step"], steps)] for k, v in part.items()} for part in parts]
        if not len(steps):
            continue
        y = np.stack([part[metric] for part in aligned])
        phase = aligned[0].get("phase", np.zeros(len(steps)))
        keep = _drawn(phase)
        x = {cost: np.median([part[cost] for part in aligned], axis=0)[keep] for cost in costs}
        spread = np.median(y, axis=0)[keep], y.min(axis=0)[keep], y.max(axis=0)[keep]
        found.append(Line(index, point.steps, metric, x, *spread, phase[keep]))
    return found


def _measured(table: dict[str, Values], metric: str) -> dict[str, Values]:
    """The rows with a finite value of the metric, the last one of each step, by step."""
    at = np.flatnonzero(np.isfinite(table[metric]) & np.isfinite(table["step"]))
    _, last = np.unique(table["step"][at][::-1], return_index=True)
    at = at[::-1][last]
    return {name: values[at] for name, values in table.items()}


def _drawn(phase: Values) -> NDArray[np.intp]:
    """The indices that are drawn: evenly spaced ones, and both sides of every change of phase."""
    n = len(phase)
    changes = np.flatnonzero(np.diff(phase))
    even = np.linspace(0, n - 1, min(n, DRAWN)).round().astype(np.intp)
    return np.unique(np.concatenate([even, changes, changes + 1]))


def turns(line: Line) -> NDArray[np.intp]:
    """The first points after a change of phase."""
    return np.flatnonzero(np.diff(line.phase)) + 1


def window(task: Task, drawn: list[Line], metric: str) -> tuple[float, float]:
    """The values worth showing: what comes in the first tenth of a line's FLOPs would press all else together."""
    shown = [
        line.median[line.x["total_flops"] >= 0.1 * line.x["total_flops"][-1]] for line in drawn if line.metric == metric
    ]
    values = np.concatenate(shown) if shown else np.array([0.0, 1.0])
    pad = 0.05 * (values.max() - values.min()) or 0.05
    return float(values.min() - pad), float(values.max() + pad)
