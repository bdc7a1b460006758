"""Figures for papers: PNG and SVG, the same bytes for the same runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from mlframe.report import colours
from mlframe.report.curves import Line, turns, window
from mlframe.report.methods import Task
from mlframe.report.page import costs

_STYLE: Any = {
    "svg.hashsalt": "mlframe", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "grid.alpha": 0.3, "legend.frameon": False, "figure.dpi": 200,
}  # fmt: skip


def draw(task: Task, lines: Sequence[Line], folder: Path) -> None:
    """<task>-<metric>-<cost>.png and .svg: the course of training against FLOPs, samples and time; and
    <task>-<metric>-finished: finished runs against FLOPs. The task's name is cut to what a file may be called."""
    name = re.sub(r"[^\w.,=-]+", "_", task.label)[:100]
    for metric in task.metrics:
        for cost, label in costs(task).items():
            _save(folder / f"{name}-{metric.replace('/', '_')}-{cost}", _course(task, lines, metric, cost, label))
        _save(folder / f"{name}-{metric.replace('/', '_')}-finished", _finished(task, metric))


def _save(path: Path, fill: Callable[[Any], None]) -> None:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = figure.subplots()
        fill(axes)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
        figure.savefig(path.with_name(f"{path.name}.png"), metadata={"Software": None})
        figure.savefig(path.with_name(f"{path.name}.svg"), metadata={"Date": None, "Creator": None})


def _course(task: Task, lines: Sequence[Line], metric: str, cost: str, label: str) -> Callable[[Any], None]:
    def fill(axes: Any) -> None:
        last = {line.method: line.steps for line in lines}  # by budget, so the largest
        for line in lines:
            if line.metric != metric:
                continue
            method, (colour, _), largest = (
                task.methods[line.method],
                colours.pair(line.method),
                last[line.method] == line.steps,
            )
            x, style = line.x[cost], "--" if method.kind == "control" else "-"
            axes.fill_between(x, line.low, line.high, color=colour, alpha=0.16, linewidth=0)
            axes.plot(x, line.median, style, color=colour, alpha=1 if largest else 0.5, linewidth=1.5 if largest else 1,
                      label=method.label if largest else None)  # fmt: skip
            at = turns(line)
            axes.plot(x[at], line.median[at], "o", color=colour, markerfacecolor="none", markersize=6)
        axes.set(xlabel=label, ylabel=metric, ylim=window(task, list(lines), metric))

    return fill


def _finished(task: Task, metric: str) -> Callable[[Any], None]:
    def fill(axes: Any) -> None:
        for index, method in enumerate(task.methods):
            colour, style = colours.pair(index)[0], "--" if method.kind == "control" else "-"
            medians = [(point.median("total_flops"), point.median(metric)) for point in method.points]
            axes.plot(*zip(*medians, strict=True), style, color=colour, linewidth=1.3, label=method.label)
            runs = [run.results for point in method.points for run in point.runs]
            axes.plot([run["total_flops"] for run in runs], [run[metric] for run in runs], colours.symbol(index)[1],
                      color=colour, markersize=4)  # fmt: skip
        axes.set(xlabel="total FLOPs", ylabel=f"final {metric}", xscale="log")

    return fill
