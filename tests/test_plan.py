"""Plans: phases, budgets, FLOPs and what describe() says."""

from __future__ import annotations

import io
from typing import Any

import pytest
from conftest import TINY, TINY_GPT2
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mlframe.architectures import GPT2, VIT
from mlframe.errors import ConfigError
from mlframe.levels import make_levels
from mlframe.plan import Phase, Plan, control, describe, scratch, vcycle

LEVELS = make_levels(VIT, TINY, count=3)
TWO = LEVELS[:2]


def shape(plan: Plan) -> list[tuple[int, int]]:
    return [(phase.level, phase.steps) for phase in plan.phases]


def test_two_levels() -> None:
    plan = vcycle(TWO, 1000, e_a=0.05, e_small=0.5, alpha=0.25)
    assert shape(plan) == [(0, 50), (1, 500), (0, 450)]
    assert [phase.alpha for phase in plan.phases] == [1.0, 1.0, 0.25]


def test_three_levels_with_a_budget_each() -> None:
    plan = vcycle(LEVELS, 1000, e_a=[40, 30], e_small=[200, 300], alpha=[0.25, 0.5])
    assert shape(plan) == [(0, 40), (1, 30), (2, 300), (1, 200), (0, 430)]
    assert [phase.alpha for phase in plan.phases[3:]] == [0.5, 0.25]
    assert shape(vcycle(LEVELS, 1000, 10, 0.2, 0.5)) == [(0, 10), (1, 10), (2, 200), (1, 200), (0, 580)]


def test_the_authors_released_example() -> None:
    assert shape(vcycle(TWO, 105_000, 5_000, 50_000, 0.25)) == [(0, 5_000), (1, 50_000), (0, 50_000)]


def test_scratch_and_the_small_model_alone() -> None:
    assert shape(scratch(TWO, 10)) == [(0, 10)]
    assert shape(scratch(TWO, 10, level=1)) == [(1, 10)]


@given(st.integers(10, 10_000), st.floats(0, 0.4), st.floats(0, 0.2))
def test_steps_always_sum_to_the_budget(steps: int, e_a: float, e_small: float) -> None:
    plan = vcycle(LEVELS, steps, e_a / 2, e_small, 0.5)
    assert plan.steps == steps
    starts = [plan.start(i) for i in range(len(plan.phases))]
    for step in {0, steps - 1, *(s for s in starts if s < steps)}:
        phase = plan.phase_at(step)
        assert starts[phase] <= step < starts[phase] + plan.phases[phase].steps
    assert plan.phase_at(steps) == len(plan.phases) - 1


def test_flops_are_the_sum_over_phases() -> None:
    plan = vcycle(TWO, 16, 4, 8, 0.5)
    assert plan.flops(10) == 10 * (8 * TWO[0].flops + 8 * TWO[1].flops)
    assert plan.scratch_flops(10) == 10 * 16 * TWO[0].flops
    assert plan.flops(10) == 2 * plan.flops(5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"e_a": 600, "e_small": 600}, "take 1200 steps, steps=1000 has fewer"),
        ({"e_a": 1.5}, r"plan\.e_a=1\.5: a float is a fraction"),
        ({"e_small": -0.1}, r"plan\.e_small=-0\.1"),
        ({"e_a": -5}, r"plan\.e_a=-5: a float is"),
        ({"alpha": 1.5}, r"plan\.alpha=1\.5: between 0"),
        ({"alpha": [0.5, 0.5]}, r"plan\.alpha=\[0\.5, 0\.5\]: 2 values for 2 levels, which need 1"),
        ({"steps": 0}, "steps=0: a whole number, 1 or more"),
        ({"levels": TWO[:1]}, "two levels or more"),
    ],
)
def test_budgets_that_cannot_be_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vcycle(**{"levels": TWO, "steps": 1000, "e_a": 0.05, "e_small": 0.5, "alpha": 0.5, **arguments})


def test_phases_that_jump_over_a_level_and_levels_that_are_not_there_are_named() -> None:
    with pytest.raises(ConfigError, match="phase 'b' is not one level from 'a'"):
        Plan(LEVELS, (Phase("a", 0, 1), Phase("b", 2, 1)))
    with pytest.raises(ConfigError, match=r"level 2: there are levels 0 to 1"):
        scratch(TWO, 10, level=2)


def test_describe_shows_each_phase_in_80_columns() -> None:
    plan = vcycle(TWO, 1000, 50, 500, 0.5)
    console = Console(file=io.StringIO(), width=80)
    console.print(describe(plan, 128))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    share = plan.flops(128) / plan.scratch_flops(128)
    assert f"{plan.flops(128):.4g} FLOPs" in text
    assert f"{share:.0%}" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:2] in (["down", "0"], ["up", "0"])]
    assert [row[2] for row in rows] == ["0", "0"]
    small = next(line.split() for line in text.splitlines() if line.split()[:1] == ["small"])
    assert small[1:4] == ["1", "2", "16"]
    shares = [float(line.split()[-1].rstrip("%")) for line in text.splitlines() if line.rstrip().endswith("%")]
    assert abs(sum(shares) - 100) < 0.3


@pytest.mark.parametrize("level", [0, 1])
def test_the_control_is_one_level_alone_for_the_flops_of_the_plan(level: int) -> None:
    plan = vcycle(TWO, 1000, e_a=0.05, e_small=0.5, alpha=0.5)
    alone = control(plan, level)
    assert shape(alone) == [(level, alone.steps)]
    assert abs(alone.flops(8) - plan.flops(8)) <= TWO[level].flops * 8 / 2
    assert (alone.steps < 1000) == (level == 0)
    assert alone.steps != plan.steps


def test_the_control_of_next_to_nothing_is_one_step() -> None:
    assert control(scratch(TWO, 1, level=1), 0).steps == 1


@pytest.mark.parametrize(("config", "steps"), [(TINY_GPT2, 1000), ({}, 300_000)], ids=["tiny", "gpt2"])
def test_describe_shows_the_rule_of_thumb(config: dict[str, Any], steps: int) -> None:
    """6 FLOPs a parameter and token: beside the exact cost, for whoever compares with papers."""
    levels = make_levels(GPT2, config, sample={"tokens": 16, "predictions": 16})
    console = Console(file=io.StringIO(), width=80)
    console.print(describe(vcycle(levels, steps, 0.05, 0.5, 0.5), 32))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    small = next(line.split() for line in text.splitlines() if line.split()[:1] == ["small"])
    flops, rule = (float(number) for number in small[-3:-1])
    assert flops == pytest.approx(steps // 2 * 32 * levels[1].flops, rel=5e-3)
    assert rule == pytest.approx(6 * levels[1].parameters * steps // 2 * 32 * 16, rel=5e-3)
    assert rule != pytest.approx(flops, rel=5e-3)
