"""Recipes: the methods that train integer codes, each as the few choices in which it differs from the others.

`profile` is "paper", exact, or "best", what measures better; docs/algorithm.md states both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.method.robust import Aggregation
from fedmpq.method.schedule import Schedule
from fedmpq.method.staleness import Buffering
from fedmpq.model.grid import StepRule

Profile = Literal["paper", "best"]
Deal = Literal["pruning_growing", "least_error", "uniform", "full"]
Merge = Literal["models", "deltas"]
Statistics = Literal["averaged", "calibrated"]
WeighBy = Literal["bits", "data"]

SHARE_LIMIT = 3.0
"""Of `best`: boards of one fleet seldom differ more, and a claim costs nothing."""
GROWING_AVERAGE = 4.0
"""Of `best`: about the last fifth of the rounds. A decay that suits ten rounds is too short for twenty."""
FIRST_CLIPS = 2.0
"""Of `best`: what is clipped has no gradient, and along the sums of a deep network that adds up."""
PROFILES: tuple[Profile, ...] = ("paper", "best")


@dataclass(frozen=True)
class Recipe:
    """How the server quantizes, deals and merges, and how clients train."""

    deal: Deal
    """Who gets which bits: Alg. 2, least error per bit, the budget on every layer, or 8 bits for everyone."""
    step_rule: StepRule
    merge: Merge
    """Average whole models, or add the average change to the global model."""
    weigh_by: WeighBy = "bits"
    """A client counts in a merge by its data and its bits, `v_n |D_n|`, or by its data alone."""
    aggregation: Aggregation = "mean"
    """How much one client can do to a merge (see method.robust)."""
    share_limit: float | None = None
    """No client counts for more than this many times the median client of the fleet; None: no limit."""
    per_channel: bool = False
    averaging: float = 0.0
    """Devices run an average over the rounds (`aggregate.moving_share`): below 1 the decay of a moving one,
    from 1 on the power of the round's number by which a model counts."""
    statistics: Statistics = "averaged"
    """Where BatchNorm's statistics of what devices run come from: the clients' running ones averaged, or
    measured by the clients for that very model (see model.calibration) and moved to each budget's weights
    (model.batch_statistics)."""
    activation_bits: int = 4
    first_clips: float = 1.0
    """Where clips of activations begin: so many times 3 behind a ReLU, times 4 behind that of a sum."""
    plan: TrainingPlan = field(default_factory=TrainingPlan)
    schedule: Schedule = field(default_factory=Schedule)
    buffering: Buffering | None = None
    """How changes of several versions of the model are merged; None: in rounds."""

    def plan_of(self, number: int) -> TrainingPlan:
        """How clients train in round `number`."""
        return self.schedule.plan(self.plan, number)


def fedmpq(profile: Profile, plan: TrainingPlan) -> Recipe:
    """Mixed precision, Group Lasso, MSB pruning, and bits re-dealt every round."""
    if profile == "paper":
        return Recipe("pruning_growing", "max", "models", plan=replace(plan, update="paper"))
    return Recipe(
        deal="least_error",
        step_rule="least_error",
        merge="deltas",
        weigh_by="data",
        aggregation="agreement",
        share_limit=SHARE_LIMIT,
        averaging=GROWING_AVERAGE,
        statistics="calibrated",
        first_clips=FIRST_CLIPS,
        plan=replace(plan, update="carried", lasso=0.0, prune_density=None),
    )


def aqfl(profile: Profile, plan: TrainingPlan) -> Recipe:
    """Every layer at the client's budget; no Lasso, no pruning, no re-dealing."""
    plain = replace(plan, lasso=0.0, prune_density=None)
    return replace(fedmpq(profile, plain), deal="uniform")


def fpq8(profile: Profile, plan: TrainingPlan) -> Recipe:
    """Eight bits everywhere, activations too, whatever the budgets."""
    return replace(aqfl(profile, plan), deal="full", activation_bits=8)


QUANTIZED_METHODS = ("fedmpq", "aqfl", "fpq8")
FLOAT_METHODS = ("fp32", "fedpaq", "uveqfed")
METHODS = QUANTIZED_METHODS + FLOAT_METHODS

Ablation = tuple[bool, bool, bool]
ABLATIONS: dict[str, Ablation] = {
    "aqfl": (False, False, False),
    "lasso": (True, False, False),
    "msb": (False, True, False),
    "msb+lasso": (True, True, False),
    "msb+deal": (False, True, True),
    "all": (True, True, True),
}
"""Table 4: Group Lasso, MSB pruning, and re-dealing (Alg. 2), each on or off."""


def ablated(profile: Profile, plan: TrainingPlan, name: str) -> Recipe:
    """FedMPQ with parts switched off.

    Without re-dealing every layer starts at the client's budget, and bits once pruned stay pruned.
    """
    lasso, prune, deal = ABLATIONS[name]
    recipe = fedmpq(profile, plan)
    kept = replace(
        recipe.plan,
        lasso=recipe.plan.lasso if lasso else 0.0,
        prune_density=recipe.plan.prune_density if prune else None,
    )
    return replace(recipe, plan=kept, deal=recipe.deal if deal else "uniform")


def make_recipe(method: str, profile: Profile, ablation: str, plan: TrainingPlan, **overrides: Any) -> Recipe:
    """The recipe of a method's name; `overrides` are fields of Recipe, None for the profile's own choice.

    An ablation and a deal are FedMPQ's to choose: they are what the other methods are. A method of one's own
    starts from FedMPQ's recipe.
    """
    others = {"aqfl": aqfl, "fpq8": fpq8}
    recipe = others[method](profile, plan) if method in others else ablated(profile, plan, ablation)
    return replace(recipe, **{name: value for name, value in overrides.items() if value is not None})
