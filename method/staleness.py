"""Asynchronous rounds: what a change counts that was made of an earlier version of the model.

The model has a version, the number of merges behind it. A board is sent version `v`; when its change is
merged into version `t`, `S = t - v` merges have gone by. It counts by its data times

    f(S) = rint(2^16 (1 + S)^-power) / 2^16,  at least 2^-16,

a whole number of 65536ths, so that weights, and the sums made with them, are the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedmpq.method.recipe import Recipe

MAX_POWER = 8.0
MAX_STALENESS = 1000
"""Of every version in flight the model is kept."""
_ONE = 1 << 16

_WHOLE_ROUND = (
    "compares the updates of one round with one another, which all start from one model; changes merged "
    "asynchronously start from several, and who is among them depends on who is fast"
)
REFUSALS = {
    "agreement": _WHOLE_ROUND,
    "krum": _WHOLE_ROUND,
    "multi_krum": _WHOLE_ROUND,
    "trimmed_mean": f"{_WHOLE_ROUND}: it would trim away the late ones",
    "median": f"{_WHOLE_ROUND}: it would leave out the late ones",
}
"""Why a rule cannot merge asynchronously, by its name."""


@dataclass(frozen=True)
class Buffering:
    """Every `count` changes make the next version of the model."""

    count: int
    power: float = 0.5
    limit: int = 20
    """Changes of more merges ago are dropped."""

    def factor(self, staleness: int) -> float:
        """What a change counts, a new one counting 1."""
        return max(1, round(_ONE * math.pow(1 + staleness, -self.power))) / _ONE

    def refusal(self, version: int, newest: int) -> str | None:
        """Why a change of that version is dropped, now that the model has another; None: it counts."""
        staleness = newest - version
        if staleness <= self.limit:
            return None
        return (
            f"its change is of version {version} of the model, {staleness} merges ago; "
            f"staleness_limit = {self.limit}"
        )


def require_bufferable(recipe: Recipe, error: type[ValueError]) -> None:
    """An error unless changes of several versions can be merged by this recipe."""
    if reason := REFUSALS.get(recipe.aggregation):
        raise error(
            f"aggregation = {recipe.aggregation!r} does not go with asynchronous: it {reason}; leave it out, "
            "or use aggregation = 'mean'"
        )
    if recipe.merge != "deltas":
        raise error(
            "merge = 'models' does not go with asynchronous: an average of whole models that started from "
            "earlier versions undoes what was merged since; use merge = 'deltas'"
        )
