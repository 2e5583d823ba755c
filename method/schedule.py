"""Learning rates over the rounds of a run: both rates of a plan are multiplied by one factor.

With `t` the round, `T` the number of rounds, `w` the rounds of warm-up and `r` the floor, for `t > w`:

    constant    1
    cosine      r + (1 - r) (1 + cos(pi (t - w - 1) / (T - w))) / 2
    steps       1, and 1/10 from half of the rounds on, 1/100 in the last quarter

and `t / (w + 1)` during warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from fedmpq.exchange.messages import TrainingPlan

ScheduleKind = Literal["constant", "cosine", "steps"]

FLOOR = 0.01
"""Where the cosine ends: rates of zero would train nothing."""


@dataclass(frozen=True)
class Schedule:
    """How the rates change over `rounds`."""

    kind: ScheduleKind = "constant"
    rounds: int = 1
    warmup: int = 0

    def factor(self, number: int) -> float:
        """Of the rates in round `number`, the first being 1. Rounds beyond the last are as the last."""
        number = min(number, self.rounds)
        if number <= self.warmup:
            return number / (self.warmup + 1)
        passed = (number - self.warmup - 1) / max(1, self.rounds - self.warmup)
        if self.kind == "cosine":
            return FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * passed)) / 2
        if self.kind == "steps":
            return 0.01 if passed >= 0.75 else 0.1 if passed >= 0.5 else 1.0
        return 1.0

    def plan(self, plan: TrainingPlan, number: int) -> TrainingPlan:
        """The plan of round `number`."""
        if (factor := self.factor(number)) == 1.0:
            return plan
        return replace(
            plan,
            learning_rate=plan.learning_rate * factor,
            code_learning_rate=plan.code_learning_rate * factor,
        )
