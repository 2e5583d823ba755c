"""Recipes: each method is the switches its table row says, and leaves the rest of the plan alone."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.method.recipe import ABLATIONS, PROFILES, Profile, ablated, aqfl, fedmpq, fpq8
from fedmpq.method.schedule import Schedule

PLAN = TrainingPlan(epochs=2, batch_size=16, learning_rate=0.05, lasso=0.02, prune_density=0.04, flip=True)


def test_the_paper_profile_is_the_paper() -> None:
    recipe = fedmpq("paper", PLAN)
    assert (recipe.deal, recipe.step_rule, recipe.merge) == ("pruning_growing", "max", "models")
    assert (recipe.plan.update, recipe.activation_bits, recipe.per_channel) == ("paper", 4, False)


def test_the_best_profile_differs_in_every_choice_it_may() -> None:
    recipe = fedmpq("best", PLAN)
    assert (recipe.deal, recipe.step_rule, recipe.merge) == ("least_error", "least_error", "deltas")
    assert (recipe.plan.update, recipe.activation_bits) == ("carried", 4)
    assert (recipe.weigh_by, recipe.averaging, recipe.statistics) == ("data", 4.0, "calibrated")
    paper = fedmpq("paper", PLAN)
    assert (paper.weigh_by, paper.averaging, paper.statistics) == ("bits", 0.0, "averaged")


def test_the_paper_profile_keeps_the_plan() -> None:
    assert fedmpq("paper", PLAN).plan == PLAN


def test_the_best_profile_keeps_the_plan_but_for_update_rule_lasso_and_pruning() -> None:
    """It returns changes: there are no planes of the model to thin out and prune."""
    plan = fedmpq("best", PLAN).plan
    assert (plan.update, plan.lasso, plan.prune_density) == ("carried", 0.0, None)
    kept = replace(plan, update=PLAN.update, lasso=PLAN.lasso, prune_density=PLAN.prune_density)
    assert kept == PLAN


def test_a_rounds_plan_is_the_schedules() -> None:
    recipe = replace(fedmpq("best", PLAN), schedule=Schedule("steps", 4))
    assert recipe.plan_of(1) == recipe.plan
    assert recipe.plan_of(3) == replace(recipe.plan, learning_rate=0.05 * 0.1, code_learning_rate=0.1 * 0.1)


@pytest.mark.parametrize("profile", PROFILES)
def test_aqfl_is_fedmpq_without_lasso_pruning_and_dealing(profile: Profile) -> None:
    recipe, full = aqfl(profile, PLAN), fedmpq(profile, PLAN)
    assert recipe.deal == "uniform"
    assert recipe.plan == replace(full.plan, lasso=0.0, prune_density=None)
    assert replace(recipe, deal=full.deal, plan=full.plan) == full


@pytest.mark.parametrize("profile", PROFILES)
def test_fpq8_is_aqfl_at_eight_bits(profile: Profile) -> None:
    recipe = fpq8(profile, PLAN)
    assert (recipe.deal, recipe.activation_bits) == ("full", 8)
    assert replace(recipe, deal="uniform", activation_bits=4) == aqfl(profile, PLAN)


@pytest.mark.parametrize("profile", PROFILES)
def test_the_ablations_run_from_aqfl_to_fedmpq(profile: Profile) -> None:
    assert ablated(profile, PLAN, "aqfl") == aqfl(profile, PLAN)
    assert ablated(profile, PLAN, "all") == fedmpq(profile, PLAN)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize(
    ("name", "lasso", "prunes", "deals"),
    [
        ("aqfl", False, False, False),
        ("lasso", True, False, False),
        ("msb", False, True, False),
        ("msb+lasso", True, True, False),
        ("msb+deal", False, True, True),
        ("all", True, True, True),
    ],
)
def test_an_ablation_is_its_row_of_the_table(
    profile: Profile, name: str, lasso: bool, prunes: bool, deals: bool
) -> None:
    recipe, full = ablated(profile, PLAN, name), fedmpq(profile, PLAN)
    assert recipe.plan.lasso == (full.plan.lasso if lasso else 0.0)
    assert recipe.plan.prune_density == (full.plan.prune_density if prunes else None)
    assert recipe.deal == (full.deal if deals else "uniform")
    switched = {"update", "lasso", "prune_density"}
    for field in fields(TrainingPlan):
        if field.name not in switched:
            assert getattr(recipe.plan, field.name) == getattr(PLAN, field.name)


def test_the_table_of_ablations_has_no_more_rows() -> None:
    assert set(ABLATIONS) == {"aqfl", "lasso", "msb", "msb+lasso", "msb+deal", "all"}
