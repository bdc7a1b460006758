"""The learning rate: closed forms written out by hand, at every step."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from conftest import TINY

from mlframe.architectures import VIT
from mlframe.errors import ConfigError
from mlframe.levels import make_levels
from mlframe.plan import vcycle
from mlframe.schedule import Schedule

PLAN = vcycle(make_levels(VIT, TINY), 100, e_a=10, e_small=60, alpha=0.5)  # phases of 10, 60, 30 steps


def rates(schedule: Schedule) -> list[float]:
    return [schedule.factor(PLAN, step) for step in range(100)]


def expect(schedule: Schedule, formula: Callable[[int], float]) -> None:
    for step, rate in enumerate(rates(schedule)):
        assert math.isclose(rate, formula(step), rel_tol=1e-12, abs_tol=1e-15), f"step {step}"


def test_cosine_over_the_whole_cycle() -> None:
    def formula(t: int) -> float:
        if t < 10:
            return (t + 1) / 10
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - 10) / 90))

    expect(Schedule("cosine", "cycle", warmup=10, final=0.1), formula)


def test_warmup_stable_decay_with_a_ramp_after_each_transition() -> None:
    def formula(t: int) -> float:
        rate = min(1, (t + 1) / 4)
        if 10 <= t < 15:
            rate *= (t - 9) / 5
        if 70 <= t < 75:
            rate *= (t - 69) / 5
        return rate * (1 if t < 80 else 1 - (t - 80) / 20)

    expect(Schedule("wsd", "cycle", warmup=4, decay=0.2, rewarm=5), formula)


def test_each_phase_restarts() -> None:
    def formula(t: int) -> float:
        start, steps = (0, 10) if t < 10 else (10, 60) if t < 70 else (70, 30)
        done, warmup = t - start, steps // 10
        return min(1, (done + 1) / warmup) * (1 - max(0, done - warmup) / (steps - warmup))

    expect(Schedule("linear", "phase", warmup=0.1), formula)


def test_a_factor_per_level_multiplies() -> None:
    plain, scaled = rates(Schedule("constant", levels=[1.0])), rates(Schedule("constant", levels=[1.0, 4.0]))
    assert plain == [1.0] * 100
    assert scaled == [1.0] * 10 + [4.0] * 60 + [1.0] * 30
    assert rates(Schedule("constant", levels=[2.0])) == [2.0] * 100


def test_no_warmup_is_no_ramp() -> None:
    assert Schedule("cosine", "cycle", warmup=0).factor(PLAN, 0) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"warmup": -1}, r"schedule\.warmup=-1"),
        ({"warmup": 5.0}, r"schedule\.warmup=5\.0: a fraction"),
        ({"decay": "x"}, r"schedule\.decay=x"),
        ({"final": 2}, r"schedule\.final=2"),
        ({"rewarm": -3}, r"schedule\.rewarm=-3"),
        ({"levels": [1.0, -2.0]}, r"schedule\.levels"),
        ({"levels": "ab"}, r"schedule\.levels"),
        ({"shape": "cos"}, "schedule.shape=cos: one of"),
        ({"span": "epoch"}, "schedule.span=epoch"),
        ({"levels": []}, "at least one"),
    ],
)
def test_what_is_no_schedule_is_named(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule(**arguments)
