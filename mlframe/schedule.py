"""The learning rate at every step of a plan, as a closed form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mlframe.errors import ConfigError, check_whole
from mlframe.plan import Budget, Plan


@dataclass(frozen=True)
class Schedule:
    """rate(step) = optimizer's lr * levels[level] * ramp * shape.

    With t steps done of the T in the span (the whole cycle, or the phase), w = warmup, d = decay, f = final:

    ramp      min(1, (t + 1) / w), and in a span "cycle" min(1, (s + 1) / rewarm) after s steps of a later phase
    constant  1
    linear    1 - (1 - f) * u,                      u = max(0, t - w) / (T - w)
    cosine    f + (1 - f) * (1 + cos(pi * u)) / 2
    wsd       1 until T - d, then linear down to f: warm-up, stable, decay

    span: "cycle" is one shape over all phases; "phase" restarts it in each.
    warmup, decay: steps, or as a float a fraction of the span.  final: the last rate as a share of the peak.
    rewarm: steps of a linear ramp after every transition, where the optimizer starts afresh.
    levels: a factor per level; one too few repeats the last.
    """

    shape: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    span: Literal["cycle", "phase"] = "phase"
    warmup: Budget = 0.0
    decay: Budget = 0.2
    final: float = 0.0
    rewarm: int = 0
    levels: Sequence[float] = (1.0,)

    def __post_init__(self) -> None:
        for name, value, allowed in (("shape", self.shape, _SHAPES), ("span", self.span, ("cycle", "phase"))):
            if value not in allowed:
                raise ConfigError(f"schedule.{name}={value}: one of {', '.join(allowed)}")
        for key, budget in (("warmup", self.warmup), ("decay", self.decay)):
            if not _number(budget) or not 0 <= budget <= (1 if isinstance(budget, float) else math.inf):
                raise ConfigError(f"schedule.{key}={budget}: a fraction between 0.0 and 1.0, or steps as an int")
        if not _number(self.final) or not 0 <= self.final <= 1:
            raise ConfigError(f"schedule.final={self.final}: the last rate over the peak, between 0 and 1")
        check_whole("schedule.rewarm", self.rewarm, 0)
        levels = self.levels if isinstance(self.levels, Sequence) and not isinstance(self.levels, str) else ()
        if not levels or not all(_number(factor) and factor > 0 for factor in levels):
            raise ConfigError(f"schedule.levels={self.levels}: a list of at least one factor above 0")

    def factor(self, plan: Plan, step: int) -> float:
        """What the optimizer's rate is multiplied by in optimizer step `step` of the plan (0-based)."""
        phase = plan.phase_at(step)
        done = step - plan.start(phase)
        if self.span == "phase":
            factor = self._span(done, plan.phases[phase].steps)
        else:
            factor = self._span(step, plan.steps)
            if phase > 0 and self.rewarm:
                factor *= min(1.0, (done + 1) / self.rewarm)
        return factor * self.levels[min(plan.phases[phase].level, len(self.levels) - 1)]

    def _span(self, t: int, total: int) -> float:
        warmup, decay = _steps(self.warmup, total), _steps(self.decay, total)
        ramp = min(1.0, (t + 1) / warmup) if warmup else 1.0
        u = min(1.0, max(0, t - warmup) / max(1, total - warmup))
        return ramp * _SHAPES[self.shape](u, t, total, decay, self.final)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _steps(budget: Budget, total: int) -> int:
    return round(budget * total) if isinstance(budget, float) else budget


def _wsd(u: float, t: int, total: int, decay: int, final: float) -> float:
    return 1.0 - (1.0 - final) * min(1.0, max(0, t - (total - decay)) / max(1, decay))


_SHAPES = {
    "constant": lambda u, t, total, decay, final: 1.0,
    "linear": lambda u, t, total, decay, final: 1.0 - (1.0 - final) * u,
    "cosine": lambda u, t, total, decay, final: final + (1.0 - final) * (1.0 + math.cos(math.pi * u)) / 2.0,
    "wsd": _wsd,
}
