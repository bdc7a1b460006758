"""Plans: which level is trained for how many optimizer steps, and how it gets its weights. From config to phases."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from mlframe.errors import ConfigError, check_whole
from mlframe.flops import short, six_nd
from mlframe.levels import Level
from mlframe.maps import NewLayers

Budget = int | float
"""Optimizer steps: an int is steps, a float a fraction of the plan's total."""


@dataclass(frozen=True)
class Phase:
    """Training at one level. `alpha`, in a phase entered from below: the share of the de-coalesced weights."""

    name: str
    level: int
    steps: int
    alpha: float = 1.0


@dataclass(frozen=True)
class Plan:
    """Phases in order, over `levels`. Neighbouring phases are one level apart.

    new_layers, split_noise: how layers and readers are split on the way up (mlframe.operators.decoalesce).
    """

    levels: tuple[Level, ...]
    phases: tuple[Phase, ...]
    new_layers: NewLayers = "copy"
    split_noise: float = 0.0

    def __post_init__(self) -> None:
        for phase in self.phases:
            if not 0 <= phase.level < len(self.levels) or not 0 <= phase.alpha <= 1:
                raise ConfigError(f"plan: {phase} needs a level of 0 to {len(self.levels) - 1} and an alpha of 0 to 1")
            if type(phase.steps) is not int:
                raise ConfigError(f"plan: {phase.steps} steps in phase {phase.name!r}; steps are whole numbers")
        for a, b in zip(self.phases, self.phases[1:], strict=False):
            if abs(a.level - b.level) != 1:
                raise ConfigError(f"plan: phase {b.name!r} is not one level from {a.name!r} ({a.level} to {b.level})")
        if any(phase.steps < 0 for phase in self.phases):
            raise ConfigError(
                f"plan: steps {[phase.steps for phase in self.phases]} of the phases; none may be negative"
            )
        if self.new_layers not in get_args(NewLayers):
            raise ConfigError(f"plan.new_layers={self.new_layers}: one of {', '.join(get_args(NewLayers))}")
        if not 0 <= self.split_noise <= 1:
            raise ConfigError(f"plan.split_noise={self.split_noise}: between 0 (even shares) and 1")
        if self.steps < 1:
            raise ConfigError("plan: no optimizer step in any phase; give steps=1 or more")

    @property
    def steps(self) -> int:
        """Optimizer steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def start(self, phase: int) -> int:
        """The optimizer step at which a phase starts."""
        return sum(p.steps for p in self.phases[:phase])

    def phase_at(self, step: int) -> int:
        """The index of the phase that takes optimizer step `step` (0-based); the last one from the end on."""
        for index in range(len(self.phases)):
            if step < self.start(index + 1):
                return index
        return len(self.phases) - 1

    def flops(self, samples_per_step: int) -> int:
        """Total FLOPs at so many samples per optimizer step."""
        return sum(phase.steps * self.levels[phase.level].flops for phase in self.phases) * samples_per_step

    def built(self, phase: int) -> Mapping[str, Tensor]:
        """The names and shapes of a phase's network: its state dict, without memory."""
        with torch.device("meta"):
            return self.levels[self.phases[phase].level].build().state_dict()

    @property
    def checkpoint_bytes(self) -> int:
        """About how large the plan's largest checkpoint is: float32 weights, Adam's two moments, and parked weights."""
        largest, parked, before = 0, set[int](), self.phases[0].level
        for phase in self.phases:
            parked |= {before} if phase.level > before else set()
            parked -= {phase.level}
            held = 3 * self.levels[phase.level].parameters + sum(self.levels[k].parameters for k in parked)
            largest, before = max(largest, 4 * held), phase.level
        return largest

    def shortened(self, steps: int) -> Plan:
        """The same phases with at most `steps` steps each."""
        phases = tuple(replace(phase, steps=min(steps, phase.steps)) for phase in self.phases)
        return replace(self, phases=phases)

    def scratch_flops(self, samples_per_step: int) -> int:
        """FLOPs of as many steps, all at full size."""
        return self.steps * self.levels[0].flops * samples_per_step


def scratch(levels: Sequence[Level], steps: int, level: int = 0) -> Plan:
    """One phase from a random init. `level` 1 or more trains a small level alone: the control of a V-cycle."""
    if type(level) is not int or not 0 <= level < len(levels):
        raise ConfigError(
            f"a plan at level {level}: there are levels 0 to {len(levels) - 1} (levels.count={len(levels)})"
        )
    check_whole("steps", steps, 1)
    return Plan(tuple(levels), (Phase("scratch", level, steps),))


def vcycle(
    levels: Sequence[Level],
    steps: int,
    e_a: Budget | Sequence[Budget],
    e_small: Budget | Sequence[Budget],
    alpha: float | Sequence[float],
    new_layers: NewLayers = "copy",
    split_noise: float = 0.0,
) -> Plan:
    """The V-cycle of the paper (algorithm 1): down the levels, `e_a` steps each; `e_small` steps at the smallest and,
    on the way up, at each level between; the full model trains for what is left of `steps`.

    e_a: for the levels 0, 1, ... that are left on the way down.  e_small: for the levels 1, 2, ... on the way up
    (the smallest last).  alpha: for the levels 0, 1, ... that are entered from below.  One value serves all.
    """
    check_whole("steps", steps, 1)
    small = len(levels) - 1
    if small < 1:
        raise ConfigError("plan=vcycle needs two levels or more: levels.count=2")
    ranges = (("e_a", e_a, small), ("e_small", e_small, small), ("alpha", alpha, small))
    downs, ups, alphas = (_each(name, value, n) for name, value, n in ranges)
    if not all(0 <= a <= 1 for a in alphas):
        raise ConfigError(f"plan.alpha={alpha}: between 0 (the parked weights) and 1 (the de-coalesced ones)")
    phases = [Phase(f"down {k}", k, _steps("e_a", downs[k], steps)) for k in range(small)]
    phases += [Phase("small", small, _steps("e_small", ups[small - 1], steps))]
    phases += [Phase(f"up {k}", k, _steps("e_small", ups[k - 1], steps), alphas[k]) for k in range(small - 1, 0, -1)]
    left = steps - sum(phase.steps for phase in phases)
    if left < 0:
        raise ConfigError(
            f"plan: e_a={e_a} and e_small={e_small} take {steps - left} steps, steps={steps} has fewer: lower them"
        )
    return Plan(tuple(levels), (*phases, Phase("up 0", 0, left, alphas[0])), new_layers, split_noise)


def control(of: Plan, level: int) -> Plan:
    """One level alone, for as many FLOPs as the plan `of` takes: `of` has to beat this, at every level."""
    alone = scratch(of.levels, 1, level)
    return scratch(of.levels, max(1, round(of.flops(1) / alone.flops(1))), level)


def _each(name: str, value: Any, n: int) -> list[Any]:
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * n
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise ConfigError(f"plan.{name}={value}: a number, or a list of them")
    if len(values) != n:
        raise ConfigError(
            f"plan.{name}={values}: {len(values)} values for {n + 1} levels, which need {n} (or one for all)"
        )
    return values


def _steps(name: str, budget: Budget, total: int) -> int:
    if not 0 <= budget <= (1 if isinstance(budget, float) else math.inf):
        raise ConfigError(f"plan.{name}={budget}: a float is a fraction of all steps, between 0 and 1; an int is steps")
    return round(budget * total) if isinstance(budget, float) else budget


def describe(plan: Plan, samples_per_step: int) -> Table:
    """The plan as a table: sizes, parameters, steps, FLOPs, beside them the rule of thumb 6ND, and the FLOPs' share."""
    total = plan.flops(samples_per_step)
    share = total / plan.scratch_flops(samples_per_step)
    sizes = plan.levels[0].sizes
    text = f" of {sizes['tokens']} tokens" if "predictions" in sizes else ""
    title = (
        f"{plan.steps:,} steps of {samples_per_step:,} samples{text}: {total:.4g} FLOPs, "
        f"{share:.0%} of as many at full size"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("phase", "level", "layers", "width", "parameters", "steps", "FLOPs", "6ND", "share"):
        table.add_column(column, justify="left" if column == "phase" else "right", no_wrap=True)
    for phase in plan.phases:
        level = plan.levels[phase.level]
        samples = phase.steps * samples_per_step
        flops, rule = samples * level.flops, six_nd(level.parameters, samples * level.sizes["tokens"])
        table.add_row(
            phase.name, str(phase.level), str(level.shape["layers"]), str(level.shape["width"]),
            f"{level.parameters:,}", f"{phase.steps:,}", short(flops), short(rule), f"{flops / total:.1%}",
        )  # fmt: skip
    return table
