"""Which runs are one task, one method, one budget, one rate. From runs to tasks.

A *task* is what is measured: the full model and the data; two tasks never share an axis. Within one, whatever else the
runs' configurations differ in names the *method*: apart from the seed (repeats), the steps (the points of its curve of
finished runs) and the rate (of which the best is taken at each budget). One level alone is *scratch* at level 0, and
else the *control* of the methods that use a level of its sizes, whatever plan or levels it was cut out of.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mlframe.report.runs import CHOICE, Run
from mlframe.run_folder import FREE

Key = tuple[tuple[str, str], ...]


def _dotted(*keys: str) -> tuple[str, ...]:
    return tuple(f"{key}." for key in keys)


_TASK = _dotted("model", "data", "trainer.limit_val_batches")
_NOT_TASK = _dotted(
    "model.task", "data.augment", "data.seed", "data.workers", "data.batch_size", "data.eval_batch_size", "data.folder",
    "data.source.folder",
)  # fmt: skip
_NO_METHOD = _dotted(
    *FREE, "name", "seed", "data.seed", "steps", "plan.steps", "optimizer.lr", "data_dir", "data.folder",
    "data.source.folder", "data.eval_batch_size", "callbacks.last", "callbacks.levels", "callbacks.best",
    "trainer.log_every_n_steps", "trainer.num_sanity_val_steps", "trainer.enable_progress_bar", "trainer.profiler",
)  # fmt: skip
_WAY = _dotted("plan", "levels", "control")
"""Of a method; one level alone is named by its sizes instead."""


@dataclass(frozen=True)
class Point:
    """A method's finished runs at one budget and its best rate, one a seed; `every`: those at all rates.

    tried: rate -> its median, inf where most of its runs diverged.  diverged: how many did at the rate that is taken.
    """

    steps: int
    rate: float | None
    runs: tuple[Run, ...]
    every: tuple[Run, ...]
    tried: Mapping[float | None, float]
    diverged: int = 0

    def values(self, name: str) -> list[float]:
        return [float(run.results[name]) for run in self.runs if name in run.results]

    def median(self, name: str) -> float:
        return statistics.median(self.values(name))


@dataclass(frozen=True)
class Method:
    """kind: scratch, method or control. `smalls`: level -> the sizes of each smaller level that it trains."""

    label: str
    kind: str
    points: tuple[Point, ...]
    sizes: str
    smalls: Mapping[int, str]


@dataclass(frozen=True)
class Task:
    """methods: scratch first (the best one first, which the others are measured by), then methods, then controls."""

    label: str
    about: str
    unit: str
    methods: tuple[Method, ...]
    metrics: tuple[str, ...] = field(default=())

    @property
    def scratch(self) -> Method | None:
        return next((method for method in self.methods if method.kind == "scratch"), None)

    @property
    def runs(self) -> Iterable[tuple[Method, Point, Run]]:
        for method in self.methods:
            for point in method.points:
                for run in point.runs:
                    yield method, point, run


def _below(key: str, prefixes: tuple[str, ...]) -> bool:
    return f"{key}.".startswith(prefixes)


@functools.cache
def _task_key(run: Run) -> Key:
    keys = (key for key in run.config if _below(key, _TASK) and not _below(key, _NOT_TASK))
    moved = json.loads(run.config.get("data_dir", '""')) or ""
    return tuple(sorted((key, run.config[key].replace(f'"{moved}/', '"')) for key in keys))


def _sizes(phase: Mapping[str, object]) -> str:
    return json.dumps(phase["sizes"], sort_keys=True)


@functools.cache
def _method_key(run: Run) -> Key:
    leave = _NO_METHOD + _WAY if run.alone else _NO_METHOD
    task = {key for key, _ in _task_key(run)}
    key = {key: text for key, text in run.config.items() if key not in task and not _below(key, leave)}
    key["samples_per_step"] = str(run.plan.get("samples_per_step"))
    if run.alone:
        key["alone"] = f"{run.phases[0]['level']} {_sizes(run.phases[0])}"
    return tuple(sorted(key.items()))


def grouped(runs: Sequence[Run]) -> tuple[list[Task], list[Run]]:
    """The tasks of the finished runs, and the runs that are left out, each with its reason."""
    finished = [run for run in runs if run.status == "finished"]
    first: dict[object, Run] = {}
    left = [run for run in runs if run.status != "finished"]
    for run in finished:
        key = (_task_key(run), _method_key(run), run.steps, run.rate, run.seed)
        if (same := first.setdefault(key, run)) is not run:
            left.append(replace(run, status="repeated", reason=f"same method, steps, rate and seed as {same.folder}"))
    by_task: dict[Key, list[Run]] = defaultdict(list)
    for run in first.values():
        by_task[_task_key(run)].append(run)
    diverged = [run for run in left if run.status == "diverged" and run.phases]
    tasks = [_task(members, [run for run in diverged if _task_key(run) == key]) for key, members in by_task.items()]
    return _told_apart(tasks, list(by_task)), sorted(left, key=lambda run: run.folder)


def _told_apart(tasks: list[Task], keys: list[Key]) -> list[Task]:
    """Tasks of one name get their differing keys beside it."""
    labels = [task.label for task in tasks]
    for index, task in enumerate(tasks):
        same = [dict(keys[other]) for other, label in enumerate(labels) if label == task.label]
        if len(same) > 1:
            mine = dict(keys[index])
            tasks[index] = replace(task, label=", ".join([task.label, *_differing(mine, same)]))
    return sorted(tasks, key=lambda task: task.label)


def _differing(mine: Mapping[str, str], all_of_them: Sequence[Mapping[str, str]]) -> list[str]:
    """What sets a configuration apart: "alpha=0.5", with as much of the key as tells it from the others."""
    keys = sorted({key for other in all_of_them for key in other})
    apart = [key for key in keys if len({other.get(key) for other in all_of_them}) > 1 and key in mine]
    ends = [key.rsplit(".", 1)[-1] for key in apart]
    return [
        f"{end if ends.count(end) == 1 else key}={mine[key].strip(chr(34))}"
        for key, end in zip(apart, ends, strict=True)
    ]


def _task(runs: Sequence[Run], diverged: Sequence[Run]) -> Task:
    names = sorted({json.loads(run.config.get("name", '"run"')) for run in runs})
    by_method: dict[Key, list[Run]] = defaultdict(list)
    for run in runs:
        by_method[_method_key(run)].append(run)
    labels = _labels(by_method)
    methods = [
        _method(labels[key], members, [run for run in diverged if _method_key(run) == key])
        for key, members in by_method.items()
    ]
    order = {"scratch": 0, "method": 1, "control": 2}
    methods.sort(key=lambda m: (order[m.kind], *_rank(m), m.label))
    full = next((p for run in runs for p in run.phases if p["level"] == 0), None)
    config = runs[0].config
    parts = [config.get("model.architecture", "").strip('"').rsplit(".", 1)[-1]]
    parts += [f"{full['parameters']:,} parameters at full size"] if full else []
    parts += [f"data {config.get('data.source._target_', config.get('data._target_', '')).strip(chr(34))}"]
    common = set.intersection(*(set(run.results) for run in runs))
    metrics = tuple(name for name in ("val/loss", "val/acc") if name in common)
    return Task(", ".join(names), " · ".join(filter(None, parts)), runs[0].unit, tuple(methods), metrics)


def _rank(method: Method) -> tuple[float, float]:
    """Of two scratch methods the one with more budgets, then the better one, is what the others are measured by."""
    return (-len(method.points), method.points[-1].median(CHOICE)) if method.kind == "scratch" else (0, 0)


def _labels(by_method: Mapping[Key, list[Run]]) -> dict[Key, str]:
    """A name for each method: its plan's, and the keys in which it differs. Those of plan and levels are compared
    among methods of one plan only."""
    configs = {key: dict(key) for key in by_method}
    kinds = {key: _kind(runs[0]) for key, runs in by_method.items()}
    labels = {}
    for key, config in configs.items():
        same = [other for name, other in configs.items() if kinds[name] == kinds[key]]
        ways = _differing(_only(config, True), [_only(c, True) for c in same])
        rest = _differing(_only(config, False), [_only(c, False) for c in configs.values()])
        labels[key] = ", ".join([kinds[key], *ways, *rest])
    return labels


def _only(config: Mapping[str, str], way: bool) -> dict[str, str]:
    return {key: text for key, text in config.items() if _below(key, _WAY) == way and key != "alone"}


def _kind(run: Run) -> str:
    """ "scratch", "control: level 1 alone (3 layers, width 32)", or the name of the plan's function."""
    if not run.alone:
        target = json.loads(run.config.get("plan._target_", '"plan"'))
        return re.sub(r"^.*\.", "", target)
    phase = run.phases[0]
    if phase["level"] == 0:
        return "scratch"
    sizes = phase["sizes"]
    return f"control: level {phase['level']} alone ({sizes.get('layers')} layers, width {sizes.get('embed')})"


def _method(label: str, runs: Sequence[Run], diverged: Sequence[Run]) -> Method:
    one = runs[0]
    kind = "method" if not one.alone else "scratch" if one.phases[0]["level"] == 0 else "control"
    smalls = {p["level"]: _sizes(p) for p in sorted(one.phases, key=lambda p: p["level"]) if p["level"]}
    steps = sorted({run.steps or 0 for run in runs})
    points = [_point(s, [r for r in runs if r.steps == s], [r for r in diverged if r.steps == s]) for s in steps]
    return Method(label, kind, tuple(points), _sizes(one.phases[0]), {} if one.alone else smalls)


def _point(steps: int, runs: Sequence[Run], diverged: Sequence[Run]) -> Point:
    """The best rate by the median of the seeds, a diverged run being worse than any: survivors alone choose nothing."""
    values: dict[float | None, list[float]] = defaultdict(list)
    for run in runs:
        values[run.rate].append(float(run.results[CHOICE]))
    for run in diverged:
        values[run.rate].append(math.inf)
    tried = {rate: statistics.median(values[rate]) for rate in sorted(values, key=lambda rate: rate or 0)}
    rate = min((run.rate for run in runs), key=lambda rate: (tried[rate], rate or 0))
    chosen = tuple(sorted((run for run in runs if run.rate == rate), key=lambda run: (run.seed or 0, run.folder)))
    return Point(steps, rate, chosen, tuple(runs), tried, sum(run.rate == rate for run in diverged))
