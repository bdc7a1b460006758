"""Savings at equal quality, on curves of finished runs; never on the course of a run whose rate has not decayed.

The saving of a run is 1 - C / C_scratch, where C is what it cost with its schedule finished, and C_scratch what scratch
costs to the same final value: on scratch's own curve of finished runs over budgets, the logarithm of the cost linear in
the value between two budgets. Nothing is extrapolated. A run that is worse than scratch's smallest budget has *not
reached* it; one that is better than scratch's largest saves *at least* what it saves against that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlframe.report.methods import Method, Point, Task

SAME = 0.02
"""Costs that differ by no more than this share are equal, as in mlframe.results."""

Curve = Sequence[tuple[float, float]]
"""(cost, value) of finished runs by cost; the lower value is the better one."""


@dataclass(frozen=True)
class Saving:
    """A share of scratch's cost, -inf where its quality is not reached; `at_least`: a lower bound."""

    share: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.share > -math.inf

    def __str__(self) -> str:
        return f"{'≥ ' if self.at_least else ''}{100 * self.share:.1f} %" if self.reached else "not reached"


@dataclass(frozen=True)
class Spread:
    """Median, least and most over all pairs of a seed of the method and a seed of scratch."""

    median: Saving
    low: Saving
    high: Saving
    pairs: int

    @property
    def gained(self) -> bool:
        return self.median.reached and self.median.share > 0

    def __str__(self) -> str:
        ends = [str(end).removesuffix(" %") for end in (self.low, self.high)]
        return str(self.median) if self.pairs == 1 or ends[0] == ends[1] else f"{self.median} ({ends[0]} to {ends[1]})"


def sign(metric: str) -> float:
    """-1 for a metric of which more is better."""
    return -1.0 if metric.endswith("acc") else 1.0


def cost_of(curve: Curve, value: float) -> tuple[float, str]:
    """The cost at which a curve of finished runs reaches `value`, interpolated in log cost; and "" for exactly so,
    "less" where its cheapest run is better already, "more" where none of its runs is as good."""
    if value >= curve[0][1]:
        return curve[0][0], "" if value == curve[0][1] else "less"
    for (cost_a, a), (cost_b, b) in pairwise(curve):
        if b <= value:
            return cost_a * (cost_b / cost_a) ** ((a - value) / (a - b)), ""
    return max(cost for cost, _ in curve), "more"


def value_at(curve: Curve, cost: float) -> float | None:
    """The value of a curve at a cost: of the run that cost as much, else interpolated in log cost, else None."""
    for other, value in sorted(curve, key=lambda point: abs(math.log(point[0] / cost))):
        if abs(other / cost - 1) <= SAME:
            return value
    for (cost_a, a), (cost_b, b) in pairwise(curve):
        if cost_a <= cost <= cost_b:
            return a + (b - a) * math.log(cost / cost_a) / math.log(cost_b / cost_a)
    return None


def curves(method: Method, metric: str, cost: str) -> list[Curve]:
    """One curve for each seed that has every budget; where there is none, that of the medians."""
    seeds = set.intersection(*({run.seed for run in point.runs} for point in method.points))
    if not seeds:
        return [median_curve(method, metric, cost)]
    per_seed: list[Curve] = []
    for seed in sorted(seeds, key=lambda seed: (seed is None, seed or 0)):
        runs = [next(run for run in point.runs if run.seed == seed) for point in method.points]
        per_seed.append(sorted((float(run.results[cost]), sign(metric) * run.results[metric]) for run in runs))
    return per_seed


def median_curve(method: Method, metric: str, cost: str) -> Curve:
    return sorted((point.median(cost), sign(metric) * point.median(metric)) for point in method.points)


def spread(savings: Sequence[Saving]) -> Spread:
    """A bound makes the median one where it lies at or below it; not reached counts as the least."""
    ordered = sorted(savings, key=lambda saving: saving.share)
    lower, upper = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    share = (lower.share + upper.share) / 2
    bound = any(saving.at_least for saving in ordered if saving.share <= upper.share)
    bounds = [saving.at_least for saving in ordered]
    low = Saving(ordered[0].share, any(s.at_least for s in ordered if s.share == ordered[0].share))
    return Spread(Saving(share, bound), low, Saving(ordered[-1].share, any(bounds)), len(ordered))


def budgets(task: Task) -> int:
    return len(task.scratch.points) if task.scratch else 0


def saved(task: Task, point: Point, metric: str, cost: str) -> Spread | None:
    """What a method's runs at one budget save at the quality that they reach. None: scratch has no two budgets."""
    if task.scratch is None or budgets(task) < 2:
        return None
    found = []
    for run in point.runs:
        for curve in curves(task.scratch, metric, cost):
            scratch, how = cost_of(curve, sign(metric) * run.results[metric])
            share = -math.inf if how == "less" else 1 - run.results[cost] / scratch
            found.append(Saving(share, how == "more"))
    return spread(found)


def saved_at_the_end(task: Task, method: Method, metric: str, cost: str) -> Spread | None:
    """What a method saves at scratch's final value, that of its largest budget, on the method's own curve of finished
    runs. None: scratch has no two budgets."""
    if task.scratch is None or budgets(task) < 2:
        return None
    found = []
    for run in task.scratch.points[-1].runs:
        for curve in curves(method, metric, cost):
            own, how = cost_of(curve, sign(metric) * run.results[metric])
            share = -math.inf if how == "more" else 1 - own / run.results[cost]
            found.append(Saving(share, how == "less"))
    return spread(found)


def trivial_at_the_end(task: Task, method: Method, metric: str, cost: str, saved: Spread) -> bool:
    """A small level alone reaches scratch's final value for no more than the method, by its own finished runs."""
    assert task.scratch is not None
    last = task.scratch.points[-1]
    limit = (1 + SAME) * (1 - saved.median.share) * last.median(cost)
    reached = [
        cost_of(median_curve(m, metric, cost), sign(metric) * last.median(metric))
        for m in task.methods
        if m.kind == "control" and m.sizes in method.smalls.values()
    ]
    return any(how != "more" and spent <= limit for spent, how in reached)


def against_scratch(task: Task, point: Point, metric: str) -> float | None:
    """A method's median less scratch's at equal FLOPs; None where scratch has no run at or around them."""
    if task.scratch is None:
        return None
    value = value_at(median_curve(task.scratch, metric, "total_flops"), point.median("total_flops"))
    return None if value is None else point.median(metric) - sign(metric) * value


@dataclass(frozen=True)
class Control:
    """A small level alone, for no more than a method's cost: its best median, None where no run of it went as far.
    `trivial`: it does as well as the method."""

    level: int
    value: float | None
    trivial: bool


def controls(task: Task, method: Method, point: Point, metric: str, cost: str) -> list[Control]:
    """For each smaller level of the method. One that wins at a lower cost wins; one that loses there says nothing."""
    found = []
    limit, mine = point.median(cost), sign(metric) * point.median(metric)
    for level, sizes in method.smalls.items():
        alone = [m for m in task.methods if m.kind == "control" and m.sizes == sizes]
        ran = [p for m in alone for p in m.points if p.median(cost) <= (1 + SAME) * limit]
        best = min((sign(metric) * p.median(metric) for p in ran), default=math.inf)
        far = any(p.median(cost) >= (1 - SAME) * limit for p in ran)
        value = sign(metric) * best if best <= mine or far else None
        found.append(Control(level, value, best <= mine))
    return found


def trivial(found: Sequence[Control]) -> bool:
    return any(control.trivial for control in found)
