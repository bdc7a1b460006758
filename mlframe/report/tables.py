"""results.csv, one row a run; and the tables of results.md and report.html."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlframe.report import savings
from mlframe.report.methods import Method, Point, Task
from mlframe.report.runs import CHOICE, COSTS, Run
from mlframe.report.savings import Control, Spread

_COLUMNS = ("task", "method", "kind", "seed", "steps", "rate", "samples_per_step", "status", "reason", "compared")
TRIVIAL = "trivial: the control does as well"
NONE = "–"  # noqa: RUF001 - a dash, for no value
NEEDS = "needs scratch at two or more budgets"


@dataclass(frozen=True)
class Table:
    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def results_csv(runs: Sequence[Run], tasks: Sequence[Task], left: Sequence[Run]) -> str:
    """One row a run, sorted. `compared`: its rate is the best one at its budget, so it is in the tables."""
    place = {
        run.folder: (task.label, method.label, method.kind)
        for task in tasks
        for method in task.methods
        for point in method.points
        for run in point.every
    }
    compared = {run.folder for task in tasks for _, _, run in task.runs}
    why = {run.folder: run for run in left}
    metrics = sorted({name for run in runs for name in run.results if name.startswith(("val/", "test/"))})
    costs = [cost for cost in COSTS if any(cost in run.results for run in runs)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*_COLUMNS, *metrics, *costs, "parameters", "folder"])
    lines = []
    for read in runs:
        run = why.get(read.folder, read)
        known = [*place.get(run.folder, ("", "", "")), run.seed, run.steps, run.rate, run.plan.get("samples_per_step")]
        known += [run.status, run.reason, "yes" if run.folder in compared else "no"]
        values = [run.results.get(name) for name in (*metrics, *costs, "parameters")]
        lines.append(["" if value is None else value for value in (*known, *values, run.folder)])
    order = {(task.label, method.label): i for task in tasks for i, method in enumerate(task.methods)}
    lines.sort(key=lambda row: (row[0] == "", row[0], order.get((str(row[0]), str(row[1])), 0), row[4] or 0,
                                row[5] or 0, row[3] or 0, row[-1]))  # fmt: skip
    writer.writerows(lines)
    return out.getvalue()


def tables(task: Task) -> Iterator[Table]:
    """A task's tables, in the order in which they are shown."""
    for metric in task.metrics:
        yield savings_table(task, metric)
        if task.scratch and savings.budgets(task) > 1:
            yield end_table(task, metric)
    yield rates_table(task)


def savings_table(task: Task, metric: str) -> Table:
    """One row a method and budget."""
    name = metric.removeprefix("val/")
    columns = ("method", "steps", "rate", "seeds", "FLOPs", metric, "vs scratch at equal FLOPs", "control",
               "FLOPs saved", "time saved")  # fmt: skip
    rows = []
    for method in task.methods:
        for point in method.points:
            cells = [method.label, f"{point.steps:,}", rate(point.rate), _seeds(point)]
            cells += [flops(point.median("total_flops")), _spread(point.values(metric))]
            if method.kind == "method":
                found = savings.controls(task, method, point, metric, "total_flops")
                cells += [_against(task, point, metric), _control(found)]
                cells += [saving_cell(task, method, point, metric, cost) for cost in ("total_flops", "wall_time")]
            else:
                cells += [_against(task, point, metric) if method.kind == "control" else NONE, NONE, NONE, NONE]
            rows.append(tuple(cells))
    few = savings.budgets(task) < 2
    note = f"A saving {NEEDS}; until then, compare at equal FLOPs." if few else (
        f"Saved: 1 - C / C of scratch at the same final {name}, on scratch's curve of finished runs "
        f"({_budgets(task.scratch)} steps); median of all pairs of seeds, in brackets the least and the most."
    )  # fmt: skip
    return Table(f"Savings at equal {name}", note, columns, tuple(rows))


def end_table(task: Task, metric: str) -> Table:
    """What each method costs to scratch's final value, on its own curve of finished runs."""
    assert task.scratch is not None
    last, name = task.scratch.points[-1], metric.removeprefix("val/")
    rows = []
    for method in task.methods:
        if method.kind == "method":
            cells = [end_cell(task, method, metric, cost) for cost in ("total_flops", "wall_time")]
            rows.append((method.label, _budgets(method), *cells))
    note = (
        f"Scratch's largest budget, {last.steps:,} steps, ends at {last.median(metric):.4f} for "
        f"{flops(last.median('total_flops'))} FLOPs. Here each method is read off its own finished runs."
    )
    return Table(f"To scratch's final {name}", note, ("method", "budgets", "FLOPs saved", "time saved"), tuple(rows))


def rates_table(task: Task) -> Table:
    rows = []
    for method in task.methods:
        for point in method.points:
            tried = ", ".join(
                f"{rate(r)}: {'diverged' if v == math.inf else f'{v:.4f}'}" for r, v in point.tried.items()
            )
            rows.append((method.label, f"{point.steps:,}", rate(point.rate), _edge(point), tried))
    note = (
        f"At each budget the rate with the best median of {CHOICE} over the seeds; a diverged run counts as the worst."
    )
    return Table("Rates", note, ("method", "steps", "taken", "grid", "tried"), tuple(rows))


def _edge(point: Point) -> str:
    rates = list(point.tried)
    if len(rates) == 1:
        return "not tuned"
    return "at the edge" if point.rate in (rates[0], rates[-1]) else "inside"


def left_table(left: Sequence[Run]) -> Table:
    rows = [(run.folder, run.status, "" if run.step is None else f"{run.step:,}", run.reason) for run in left]
    return Table("Left out", "In no table and no figure above.", ("run", "status", "step", "reason"), tuple(rows))


def saving_cell(task: Task, method: Method, point: Point, metric: str, cost: str) -> str:
    saved = savings.saved(task, point, metric, cost)
    alone = savings.controls(task, method, point, metric, cost)
    return _marked(saved, savings.trivial(alone))


def end_cell(task: Task, method: Method, metric: str, cost: str) -> str:
    saved = savings.saved_at_the_end(task, method, metric, cost)
    return _marked(saved, saved is not None and savings.trivial_at_the_end(task, method, metric, cost, saved))


def _marked(saved: Spread | None, trivial: bool) -> str:
    if saved is None:
        return NEEDS
    return f"{saved}; {TRIVIAL}" if saved.gained and trivial else str(saved)


def _control(found: Sequence[Control]) -> str:
    return "; ".join(
        f"level {c.level}: none at these FLOPs" if c.value is None
        else f"level {c.level}: {c.value:.4f}, {'does as well' if c.trivial else 'loses'}"
        for c in found
    )  # fmt: skip


def _against(task: Task, point: Point, metric: str) -> str:
    less = savings.against_scratch(task, point, metric)
    return NONE if less is None else f"{less:+.4f}"


def _seeds(point: Point) -> str:
    return f"{len(point.runs)}, {point.diverged} diverged" if point.diverged else str(len(point.runs))


def _spread(values: Sequence[float]) -> str:
    median = f"{statistics.median(values):.4f}"
    return median if len(values) == 1 else f"{median} ({min(values):.4f} to {max(values):.4f})"


def _budgets(method: Method | None) -> str:
    return ", ".join(f"{point.steps:,}" for point in method.points) if method else ""


def rate(value: float | None) -> str:
    return NONE if value is None else f"{value:g}"


def flops(value: float) -> str:
    return f"{value:.3e}".replace("e+", "e")


def results_md(tasks: Sequence[Task], left: Sequence[Run]) -> str:
    out = ["# Results", "", counts(tasks, left), ""]
    for task in tasks:
        out += [f"## {task.label}", "", task.about, ""]
        for table in tables(task):
            out += _markdown(table, "###")
    if left:
        out += _markdown(left_table(left), "##")
    return "\n".join(out)


def counts(tasks: Sequence[Task], left: Sequence[Run]) -> str:
    compared = sum(1 for task in tasks for _ in task.runs)
    every = sum(len(point.every) for task in tasks for method in task.methods for point in method.points)
    return f"{compared} runs compared, {every - compared} at other rates, {len(left)} left out."


def _markdown(table: Table, heading: str) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (table.columns, *table.rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    rule = f"|{'---|' * len(table.columns)}"
    return [f"{heading} {table.title}", "", table.note, "", lines[0], rule, *lines[1:], ""]
