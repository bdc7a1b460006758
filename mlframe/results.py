"""The last lines of a run: what each level took, how good the network is, what it cost, and what it has to beat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from mlframe import run_folder
from mlframe.errors import ConfigError
from mlframe.flops import short

SAME = 0.02
"""Runs whose FLOPs differ by no more than this share are compared."""


def report(console: Console, folder: Path, results: dict[str, Any]) -> None:
    """Print a run's results, and beside them those of its neighbours at equal FLOPs: the controls of a V-cycle."""
    unit = next(key for key in ("images", "tokens", "samples") if key in results)
    table = new_table("level", "parameters", unit, "FLOPs", "time", f"{unit}/s")
    for level, cost in results["levels"].items():
        rate = cost[unit] / cost["seconds"] if cost["seconds"] else 0.0
        table.add_row(
            str(level), f"{cost['parameters']:,}", f"{cost[unit]:,}", short(cost["flops"]),
            _duration(cost["seconds"]), f"{rate:,.0f}",
        )  # fmt: skip
    console.print(table)
    if equal := _neighbours(folder, results):
        console.print(_compared(folder, results, equal))
    elif _visits_levels(folder):
        console.print("The small model alone, for as many FLOPs, is the control of this run: add control=1")
    console.print("test: " + ", ".join(f"{name} {value:.4f}" for name, value in tested(results).items()))
    console.print(
        f"cost: {results['total_flops']:.4g} FLOPs, {results['share_of_scratch']:.0%} of as many steps at full size; "
        f"{_duration(results['wall_time'])} of training"
    )
    levels = ", levels/ (the smaller ones)" if (folder / "levels").is_dir() else ""
    console.print(
        f"in {folder}: final/ (the network){levels}, metrics.csv, plan.json, config.yaml, checkpoints/, results.json"
    )


def _neighbours(folder: Path, results: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    """Finished runs beside this one that took as many FLOPs."""
    found = {}
    for path in sorted(folder.resolve().parent.glob("*/results.json")):
        try:
            other = run_folder.read_results(path.parent)
        except ConfigError:  # a damaged neighbour is no fault of this run
            continue
        if path.parent == folder.resolve() or other is None or not (path.parent / "plan.json").exists():
            continue
        if abs(other.get("total_flops", 0) / results["total_flops"] - 1) <= SAME:
            found[path.parent] = other
    return found


def _compared(folder: Path, results: dict[str, Any], equal: dict[Path, dict[str, Any]]) -> Table:
    names = list(tested(results))
    table = new_table("levels", *names, "FLOPs", "time")
    table.add_column("at equal FLOPs", overflow="fold")
    for run, values in {folder: results, **equal}.items():
        reached = tested(values)
        scores = [f"{reached[name]:.4f}" if name in reached else "" for name in names]
        levels, name = " ".join(map(str, _levels(run))), "this run" if run == folder else run.name
        table.add_row(levels, *scores, short(values["total_flops"]), _duration(values["wall_time"]), name)
    return table


def _levels(folder: Path) -> list[int]:
    """The levels that a run's phases trained, in order."""
    return [phase["level"] for phase in json.loads((folder / "plan.json").read_text())["phases"] if phase["steps"]]


def _visits_levels(folder: Path) -> bool:
    return len(set(_levels(folder))) > 1


def tested(results: dict[str, Any]) -> dict[str, float]:
    return {name.removeprefix("test/"): value for name, value in results.items() if name.startswith("test/")}


def new_table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
