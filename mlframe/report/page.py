"""report.html: one file that needs no network, with plotly.js inside. Its look is page.html, its figures page.js."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from mlframe.report import colours, savings
from mlframe.report.curves import Line, axes, turns, window
from mlframe.report.methods import Method, Task
from mlframe.report.runs import Run
from mlframe.report.tables import NEEDS, NONE, TRIVIAL, Table, counts, left_table, tables

_HOW = """
<p><b>A saving</b> is 1 - C / C of scratch, where C is what a run cost with its schedule finished, and C of scratch what
scratch costs to the same final value: read off scratch's own finished runs over budgets, the logarithm of the cost
linear in the value between two of them. Nothing is extrapolated: <i>not reached</i> is worse than scratch's smallest
budget, and ≥ means better than its largest. The crossing of two courses of training is no saving, as a rate that has
not decayed flatters whoever decays first.</p>
<p><b>The control</b> is a method's small level alone, for as many FLOPs (within 2 %). Where it does as well, a saving
is trivial: the small model is simply the better buy.</p>
<p><b>FLOPs</b> count all that a run trained, at every level. Time is the runs' own, and compares on one idle machine
only. Lines are thinned for drawing to some 300 points, bands go from the least to the most seed, and rings mark changes
of phase. Every number is computed from the whole files; results.csv has one row a run.</p>
"""


def page(tasks: Sequence[Task], lines: Sequence[Sequence[Line]], left: Sequence[Run]) -> str:
    folder = Path(__file__).parent
    links = [f'<a href="#task{i}">{escape(task.label)}</a>' for i, task in enumerate(tasks)] if len(tasks) > 1 else []
    links += ['<a href="#left">Left out</a>'] if left else []
    body = [
        f'<header><h1>mlframe report</h1><p class="soft">{counts(tasks, left)}</p><nav>{"".join(links)}</nav></header>'
    ]
    body += [_section(i, task, bool(drawn)) for i, (task, drawn) in enumerate(zip(tasks, lines, strict=True))]
    if left:
        body.append(f'<section id="left">{_table(left_table(left))}</section>')
    body.append(f'<footer class="soft">{_HOW}</footer>')
    data = json.dumps([_data(task, drawn) for task, drawn in zip(tasks, lines, strict=True)], separators=(",", ":"))
    parts = {
        "BODY": "\n".join(body),
        "DATA": data.replace("<", "\\u003c"),
        "SCRIPT": (folder / "page.js").read_text(),
        "PLOTLY": get_plotlyjs(),
    }
    html = (folder / "page.html").read_text()
    for name, text in parts.items():
        before, after = html.split(f"<!-- {name} -->")
        html = before + text + after
    return html


def _section(index: int, task: Task, courses: bool) -> str:
    cards = "".join(_card(i, task, method) for i, method in enumerate(task.methods) if method.kind == "method")
    shown = list(tables(task))
    out = [f'<section id="task{index}"><h2>{escape(task.label)}</h2><p class="soft">{escape(task.about)}</p>']
    out += [f'<div class="cards">{cards}</div>'] if cards else []
    out += [_table(table) for table in shown if table.title.endswith("loss")]
    out += [_figure("finished", "Finished runs", "One dot a run, a line through the medians over budgets.", task)]
    if courses:
        note = "The median of the seeds, a band from the least to the most; rings: a phase begins, at another size."
        out += [_figure("course", "Training", note, task)]
    out += [_table(table, folded=True) for table in shown if not table.title.endswith("loss")]
    return "".join(out) + "</section>"


def _card(index: int, task: Task, method: Method) -> str:
    """What the method saves at scratch's final value, if its budgets lie around it; else at its largest budget."""
    point, metric, cost = method.points[-1], task.metrics[0], "total_flops"
    quality, budget = "the same", f", {point.steps:,} steps"
    saved, time = (savings.saved(task, point, metric, c) for c in (cost, "wall_time"))
    found = savings.controls(task, method, point, metric, cost)
    trivial = savings.trivial(found)
    end = savings.saved_at_the_end(task, method, metric, cost)
    if end is not None and end.median.reached and not end.median.at_least:
        saved, time = end, savings.saved_at_the_end(task, method, metric, "wall_time")
        quality, budget, trivial = "scratch's final", "", savings.trivial_at_the_end(task, method, metric, cost, end)
    big, more, reached = "No saving yet", NEEDS, saved is not None and saved.median.reached
    if saved is not None:
        big = str(saved.median) if reached else "Not reached"
        spread = f" ({saved.low} to {saved.high})" if reached and saved.pairs > 1 else ""
        more = f"of the FLOPs saved at {quality} {metric}{spread}; of the time {time.median if time else NONE}"
        more = more if reached else f"worse than scratch's smallest budget, in {metric}"
    gained = saved is not None and saved.gained
    if trivial:
        badge = ("warn", TRIVIAL if gained else "the control does as well")
    elif any(control.value is None for control in found):
        badge = ("", "no control at these FLOPs")
    else:
        badge = ("good" if gained else "", "the control loses")
    name = f'<span class="dot" data-method="{index}"></span>{escape(method.label + budget)}'
    return (
        f'<div class="card"><p class="name">{name}</p><p class="big{"" if reached else " words"}">{_whole(big)}</p>'
        f'<p class="soft">{_whole(more)}</p><span class="badge {badge[0]}">{escape(badge[1])}</span></div>'
    )


def _figure(name: str, title: str, note: str, task: Task) -> str:
    choices = {"metric": {metric: metric for metric in task.metrics}, "cost": costs(task)}
    if name == "course":
        choices["log"] = {"linear": "linear", "log": "logarithmic"}
    said = {"metric": "Show", "cost": "against", "log": "scale"}
    bar = "".join(
        f'<label>{said[key]} <select name="{key}">'
        + "".join(f'<option value="{value}">{escape(text)}</option>' for value, text in options.items())
        + "</select></label>"
        for key, options in choices.items()
    )
    legend = "".join(
        f'<button value="{i}" aria-pressed="true"><span class="swatch{" dashed" if method.kind == "control" else ""}" '
        f'data-method="{i}"></span>{escape(method.label)}</button>'
        for i, method in enumerate(task.methods)
    )
    return (
        f'<div class="block"><h3>{title}</h3><p class="soft">{note}</p><div class="bar">{bar}</div>'
        f'<div class="plot {name}"></div><div class="legend">{legend}</div></div>'
    )


def costs(task: Task) -> dict[str, str]:
    return dict(zip(axes(task), ("total FLOPs", task.unit, "seconds of training"), strict=True))


def _table(table: Table, folded: bool = False) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(
        "<tr>" + "".join(_cell(name, text) for name, text in zip(table.columns, row, strict=True)) + "</tr>"
        for row in table.rows
    )
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    inner = f'<p class="soft">{escape(table.note)}</p><div class="wide">{whole}</div>'
    if folded:
        return f'<details class="block"><summary>{escape(table.title)}</summary>{inner}</details>'
    return f'<div class="block"><h3>{escape(table.title)}</h3>{inner}</div>'


def _cell(name: str, text: str) -> str:
    """Its column's name is beside it on a phone, where cells without a value are left out."""
    none = ' class="none"' if text in (NONE, "") else ""
    return f'<td{none} data-label="{escape(name)}">{_whole(text)}</td>'


def _whole(text: str) -> str:
    """Escaped; a number stays with its unit in one line."""
    return escape(text).replace("≥ ", "≥&nbsp;").replace(" %", "&nbsp;%")


def _data(task: Task, drawn: Sequence[Line]) -> dict[str, Any]:
    names = (*axes(task), *task.metrics)
    methods = [
        {
            "label": method.label, "kind": method.kind, "colours": colours.pair(i), "symbol": colours.symbol(i)[0],
            "points": [
                {
                    "steps": point.steps,
                    "median": {name: point.median(name) for name in names},
                    "runs": [
                        {**{name: run.results[name] for name in names}, "seed": run.seed, "rate": run.rate}
                        for run in point.runs
                    ],
                }
                for point in method.points
            ],
        }
        for i, method in enumerate(task.methods)
    ]  # fmt: skip
    return {
        "metrics": task.metrics,
        "costs": costs(task),
        "methods": methods,
        "lines": [_line(task, line) for line in drawn],
        "windows": {metric: window(task, list(drawn), metric) for metric in task.metrics},
    }


def _line(task: Task, line: Line) -> dict[str, Any]:
    point = next(point for point in task.methods[line.method].points if point.steps == line.steps)
    # Of a plan's phases, those without steps too: a row counts them all.
    phases = [f"{phase['name']} (level {phase['level']})" for phase in point.runs[0].plan["phases"]]
    return {
        "method": line.method, "steps": line.steps, "metric": line.metric, "phases": phases,
        "phase": line.phase.astype(int).tolist(), "turns": turns(line).tolist(),
        "x": {cost: _short(values.tolist()) for cost, values in line.x.items()},
        "median": _short(line.median.tolist()), "low": _short(line.low.tolist()), "high": _short(line.high.tolist()),
    }  # fmt: skip


def _short(values: list[float]) -> list[float]:
    """Six digits: more than a screen shows."""
    return [float(f"{value:.6g}") for value in values]
