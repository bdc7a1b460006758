"""Savings at equal quality, against numbers computed by hand; what is left out; what a wrong definition would say.

Scratch's loss is 4 - log10(FLOPs / 1e6) throughout: 4 at 1e6 FLOPs, 3 at 1e7, so that each loss has a known cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from report_runs import write_run

from mlframe.report import savings
from mlframe.report.methods import Task, grouped
from mlframe.report.runs import Run, read_all
from mlframe.report.tables import NEEDS, TRIVIAL, left_table, rates_table, saving_cell, savings_table


def scratch(folder: Path, seeds: Sequence[int] = (0,), **changes: Any) -> None:
    for seed in seeds:
        for exponent, steps in ((6, 100), (7, 1000)):
            name = f"scratch {steps} {seed} {len(list(folder.glob('*')))}"
            write_run(folder / name, "scratch", 10**exponent, 10.0 - exponent, steps, seed, **changes)


def read(folder: Path) -> tuple[Task, list[Run]]:
    tasks, left = grouped(read_all([folder]))
    (task,) = tasks
    return task, left


def saved(task: Task, label: str = "vcycle", metric: str = "val/loss", cost: str = "total_flops") -> savings.Spread:
    method = next(method for method in task.methods if method.label == label)
    found = savings.saved(task, method.points[-1], metric, cost)
    assert found is not None
    return found


def test_saving_is_one_less_the_cost_over_scratch_s_at_the_same_loss(tmp_path: Path) -> None:
    """Losses 3.5, 3.4, 3.3 cost scratch 10^6.5, 10^6.6, 10^6.7; the runs took 2e6 FLOPs, and 1.2 times as long each."""
    scratch(tmp_path)
    for seed, loss in enumerate((3.5, 3.4, 3.3)):
        write_run(tmp_path / f"v{seed}", "vcycle", 2_000_000, loss, 300, seed, seconds=240_000)
    task, _ = read(tmp_path)
    assert [method.kind for method in task.methods] == ["scratch", "method"]
    by_hand = [1 - 2e6 / 10**exponent for exponent in (6.5, 6.6, 6.7)]
    found = saved(task)
    assert [found.low.share, found.median.share, found.high.share] == pytest.approx(by_hand, abs=1e-12)
    assert saved(task, cost="wall_time").median.share == pytest.approx(1 - 2.4e6 / 10**6.6, abs=1e-12)
    assert str(found) == "49.8 % (36.8 to 60.1)"
    # The crossing of scratch's undecayed course: its 1e7 run is at 3.4 only after nine tenths. Another number.
    crossing = 1 - 2e6 / 0.9e7
    assert abs(crossing - found.median.share) > 0.2


def test_an_undecayed_course_changes_no_saving(tmp_path: Path) -> None:
    """Negative control: where the course of the method crosses scratch's final loss early, only its end counts."""
    scratch(tmp_path / "a")
    scratch(tmp_path / "b", course=((0.1, 9.0), (0.9, 8.0)))
    write_run(tmp_path / "a" / "v", "vcycle", 2_000_000, 3.5, 300, course=((0.05, 3.0), (0.5, 3.0)))
    write_run(tmp_path / "b" / "v", "vcycle", 2_000_000, 3.5, 300, course=((0.5, 9.0),))
    assert saved(read(tmp_path / "a")[0]) == saved(read(tmp_path / "b")[0])


def test_a_saving_spreads_over_scratch_s_seeds_too(tmp_path: Path) -> None:
    """A second scratch seed, 0.1 better at both budgets, reaches 3.5 at 10^6.4."""
    scratch(tmp_path)
    for exponent, steps in ((6, 100), (7, 1000)):
        write_run(tmp_path / f"other {steps}", "scratch", 10**exponent, 9.9 - exponent, steps, seed=1)
    write_run(tmp_path / "v", "vcycle", 2_000_000, 3.5, 300)
    found = saved(read(tmp_path)[0])
    assert [found.low.share, found.high.share] == pytest.approx([1 - 2e6 / 10**6.4, 1 - 2e6 / 10**6.5])
    assert found.pairs == 2


@pytest.mark.parametrize(("loss", "text"), [(4.2, "not reached"), (2.9, "≥ 80.0 %"), (4.0, "-100.0 %")])
def test_nothing_is_extrapolated(tmp_path: Path, loss: float, text: str) -> None:
    scratch(tmp_path)
    write_run(tmp_path / "v", "vcycle", 2_000_000, loss, 300)
    assert str(saved(read(tmp_path)[0])) == text


def test_not_reached_in_most_seeds_stays_so() -> None:
    missed, hit, bound = savings.Saving(-math.inf), savings.Saving(0.2), savings.Saving(0.1, at_least=True)
    assert str(savings.spread([missed, hit])) == "not reached (not reached to 20.0)"
    assert str(savings.spread([missed, hit, hit])) == "20.0 % (not reached to 20.0)"
    assert savings.spread([bound, hit, hit]).median == savings.Saving(0.2, at_least=True)


def test_to_scratch_s_final_loss_on_the_method_s_own_curve(tmp_path: Path) -> None:
    """The method's loss is 0.2 better: it reaches 3 at 10^6.8."""
    scratch(tmp_path)
    for exponent, steps in ((6, 300), (7, 3000)):
        write_run(tmp_path / f"v{steps}", "vcycle", 10**exponent, 9.8 - exponent, steps)
    write_run(tmp_path / "short", "vcycle", 10**6, 3.8, 300, plan__alpha=0.5)
    task, _ = read(tmp_path)
    methods = {method.label: method for method in task.methods}
    at_end = savings.saved_at_the_end(task, methods["vcycle, alpha=0.25"], "val/loss", "total_flops")
    assert at_end is not None
    assert at_end.median.share == pytest.approx(1 - 10**-0.2)
    short = savings.saved_at_the_end(task, methods["vcycle, alpha=0.5"], "val/loss", "total_flops")
    assert str(short) == "not reached"


def test_of_accuracy_more_is_better(tmp_path: Path) -> None:
    for exponent, steps in ((6, 100), (7, 1000)):
        write_run(tmp_path / f"s{steps}", "scratch", 10**exponent, 3.0, steps, acc=0.1 * exponent)
    write_run(tmp_path / "v", "vcycle", 2_000_000, 3.0, 300, acc=0.65)
    assert saved(read(tmp_path)[0], metric="val/acc").median.share == pytest.approx(1 - 2e6 / 10**6.5)


def test_one_budget_of_scratch_is_no_curve(tmp_path: Path) -> None:
    write_run(tmp_path / "s", "scratch", 10**6, 4.0)
    write_run(tmp_path / "v", "vcycle", 1_010_000, 3.9, 300)
    task, _ = read(tmp_path)
    row = savings_table(task, "val/loss").rows[1]
    assert row[-2:] == (NEEDS, NEEDS)
    assert row[6] == "-0.1000"


@pytest.mark.parametrize(
    ("cost", "loss", "trivial"),
    [(2_000_000, 3.5, True), (1_000_000, 3.5, True), (2_000_000, 3.6, False), (9**7, 3.0, False)],
)
def test_a_saving_is_trivial_where_the_control_does_as_well(
    tmp_path: Path, cost: int, loss: float, trivial: bool
) -> None:
    """At no more FLOPs: one that wins with more of them says nothing."""
    scratch(tmp_path)
    write_run(tmp_path / "v", "vcycle", 2_000_000, 3.5, 300)
    write_run(tmp_path / "c", "control", cost, loss, 900)
    task, _ = read(tmp_path)
    cell = saving_cell(task, task.methods[1], task.methods[1].points[0], "val/loss", "total_flops")
    assert cell == (f"36.8 %; {TRIVIAL}" if trivial else "36.8 %")


def test_runs_that_did_not_finish_are_listed_and_change_nothing(tmp_path: Path) -> None:
    scratch(tmp_path)
    write_run(tmp_path / "v", "vcycle", 2_000_000, 3.5, 300)
    before = saved(read(tmp_path)[0])
    for status in ("failed", "diverged", "stopped", "running"):
        write_run(tmp_path / status, "vcycle", 2_000_000, 1.0, 300, seed=7, status=status, reason="why")
    write_run(tmp_path / "twice", "vcycle", 2_000_000, 3.5, 300)
    (write_run(tmp_path / "worn", "vcycle", 1, 1.0) / "results.json").write_text("{")
    (tmp_path / "status.csv").write_text(
        "job,status,reason,step,overrides\ngone,failed,no room,,seed=3\nv,finished,,300,\n"
    )
    task, left = read(tmp_path)
    assert saved(task) == before
    # Of two runs of one configuration the first folder counts: "twice" comes before "v".
    assert {Path(run.folder).name: run.status for run in left} == {
        "failed": "failed", "diverged": "diverged", "stopped": "stopped", "running": "running", "v": "repeated",
        "worn": "unreadable", "gone": "failed",
    }  # fmt: skip
    assert [row[3] for row in left_table(left).rows].count("why") == 4


def test_the_best_rate_is_taken_and_a_diverged_one_is_the_worst(tmp_path: Path) -> None:
    for seed in range(3):
        write_run(tmp_path / f"a{seed}", "scratch", 10**6, 4.0, seed=seed, lr=1e-3)
        status = "finished" if seed == 0 else "diverged"
        write_run(tmp_path / f"b{seed}", "scratch", 10**6, 3.0, seed=seed, lr=1e-2, status=status)
        write_run(tmp_path / f"c{seed}", "scratch", 10**6, 4.5, seed=seed, lr=1e-4)
    task, left = read(tmp_path)
    (point,) = task.methods[0].points
    assert (point.rate, len(point.runs), len(left)) == (1e-3, 3, 2)
    assert rates_table(task).rows[0][2:] == ("0.001", "inside", "0.0001: 4.5000, 0.001: 4.0000, 0.01: diverged")
