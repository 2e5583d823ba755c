"""Settings: what is taken, what is refused and in which words, and the way through TOML and JSON and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.lab.experiment import (
    PAPER_BUDGETS,
    Experiment,
    ExperimentError,
    make_experiment,
    read_toml,
)
from fedmpq.lab.simulation import prepare
from fedmpq.method.recipe import (
    ABLATIONS,
    METHODS,
    PROFILES,
    QUANTIZED_METHODS,
    Statistics,
    ablated,
    aqfl,
    fedmpq,
    fpq8,
)
from fedmpq.method.schedule import Schedule, ScheduleKind
from fedmpq.model.graph import Quantize
from tests.lab.small_experiment import SMALL


def refused(settings: dict[str, Any]) -> str:
    """The message for these settings: one line that names the first of them."""
    with pytest.raises(ExperimentError) as caught:
        make_experiment({"data": "digits", **settings})
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


def test_the_defaults_are_the_papers_experiment_with_the_best_profile() -> None:
    experiment = make_experiment({"data": "cifar10:x"})
    assert list(experiment.budgets) == [2, 2, 4, 4, 4, 6, 6, 6, 8, 8] == list(PAPER_BUDGETS)
    assert (experiment.method, experiment.profile, experiment.model) == ("fedmpq", "best", "resnet20")
    assert (experiment.rounds, experiment.epochs, experiment.batch_size) == (50, 5, 64)
    assert (experiment.learning_rate, experiment.momentum, experiment.weight_decay) == (0.1, 0.9, 5e-4)
    assert (experiment.clients, experiment.clients_per_round, experiment.alpha) == (10, 5, 0.5)
    plan, paper = experiment.recipe().plan, make_experiment({"data": "x", "profile": "paper"}).recipe().plan
    assert (plan.update, plan.lasso, plan.prune_density, plan.momentum_bits) == ("carried", 0.0, None, 8)
    assert (paper.update, paper.lasso, paper.prune_density, paper.momentum_bits) == ("paper", 0.01, 0.03, 32)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budgets": [0.5, 4]}, ("budget of 0.5", "1..8")),
        ({"budgets": [4, 8.5]}, ("budget of 8.5", "1..8")),
        ({"budgets": [math.nan]}, ("budget of nan", "1..8")),
        ({"budgets": []}, ("budgets is empty",)),
        ({"budgets": 4}, ("budgets = 4", "list")),
        ({"budgets": "2,4"}, ("budgets = '2,4'", "list")),
        ({"budgets": [2, "4"]}, ("budgets holds '4'", "number")),
        ({"budgets": [2, True]}, ("budgets holds True", "number")),
        ({"budgets": [10**400]}, ("budgets", "too large")),
        ({"clients": 3, "budgets": [2, 4]}, ("3 clients", "2 budgets", "one budget for each client")),
        ({"clients": 20}, ("20 clients", "10 budgets")),
        ({"clients": "10"}, ("clients = '10'", "whole number")),
        ({"clients": True}, ("clients = True", "whole number")),
        ({"alpha": 0.0}, ("alpha = 0.0", "positive")),
        ({"alpha": math.nan}, ("alpha = nan", "positive")),
        ({"participation": 0.0}, ("participation = 0.0",)),
        ({"participation": 1.01}, ("participation = 1.01",)),
        ({"rounds": 0}, ("rounds = 0", "least is 1")),
        ({"rounds": 2.5}, ("rounds = 2.5", "whole number")),
        ({"rounds": True}, ("rounds = True", "whole number")),
        ({"train_limit": -1}, ("train_limit = -1",)),
        ({"seed": -1}, ("seed = -1",)),
        ({"seed": 2**32}, ("seed = 4294967296",)),
        ({"learning_rate": 0}, ("learning_rate = 0.0", "positive")),
        ({"learning_rate": math.inf}, ("learning_rate = inf",)),
        ({"learning_rate": 1e39}, ("learning_rate = 1e+39", "single precision")),
        ({"learning_rate": "0.1"}, ("learning_rate = '0.1'", "number")),
        ({"learning_rate": 10**400}, ("learning_rate", "too large")),
        ({"batch_size": 1}, ("batch_size = 1", "least is 2")),
        ({"momentum_bits": 16}, ("momentum_bits = 16", "0, 8, 32")),
        ({"flip": 1}, ("flip = 1", "true or false")),
        ({"averaging": 101}, ("averaging = 101.0", "0..100: below 1 a decay, from 1 on a power")),
        ({"averaging": -0.1}, ("averaging = -0.1", "outside 0..100")),
        ({"averaging": math.nan}, ("averaging = nan", "outside 0..100")),
        ({"averaging": "0.5"}, ("averaging = '0.5'", "number")),
        ({"averaging": True}, ("averaging = True", "number")),
        ({"averaging": 10**400}, ("averaging", "too large")),
        ({"statistics": False}, ("statistics = False", "word")),
        ({"statistics": "moved"}, ("statistics = 'moved'", "averaged, calibrated")),
        ({"moved_statistics": True}, ("'moved_statistics'", "did you mean 'statistics'?")),
        ({"schedule": "cosin"}, ("schedule = 'cosin'", "did you mean 'cosine'?")),
        ({"warmup": 3, "rounds": 3}, ("warmup = 3", "0..2")),
        ({"warmup": -1}, ("warmup = -1", "0..49")),
        ({"warmup": 0.5}, ("warmup = 0.5", "whole number")),
        ({"lasso": 0.0}, ("lasso = 0.0", "profile paper", "best")),
        ({"prune_density": 0.0}, ("prune_density = 0.0", "profile paper", "best")),
        ({"merge": "models"}, ("merge = 'models'", "profile paper", "best")),
        *(
            ({"ablation": name}, (f"ablation = '{name}'", "profile paper", "best"))
            for name in ("lasso", "msb", "msb+lasso", "msb+deal")
        ),
        ({"method": "fpq8", "lasso": 0.1}, ("lasso = 0.1", "profile paper", "best")),
        ({"evaluate_every": 0}, ("evaluate_every = 0", "least is 1")),
        ({"evaluate_every": 2.0}, ("evaluate_every = 2.0", "whole number")),
        ({"model": 20}, ("model = 20", "word")),
        ({"method": "fedmpg"}, ("method = 'fedmpg'", "did you mean 'fedmpq'?")),
        ({"method": "sgd"}, ("method = 'sgd'", "fedmpq, aqfl, fpq8, fp32, fedpaq, uveqfed")),
        ({"profile": "fast"}, ("profile = 'fast'", "paper, best")),
        ({"ablation": "msb+laso"}, ("ablation", "did you mean 'msb+lasso'?")),
        ({"engine": "cuda"}, ("engine = 'cuda'", "torch")),
        ({"merge": "model"}, ("merge = 'model'", "did you mean 'models'?")),
        ({"method": "aqfl", "ablation": "lasso"}, ("ablation = 'lasso'", "fedmpq", "aqfl")),
        ({"method": "fpq8", "deal": "uniform"}, ("deal = 'uniform'", "fedmpq", "fpq8")),
        ({"learning-rte": 0.1}, ("'learning_rte'", "did you mean 'learning_rate'?")),
        ({"zzz": 1}, ("'zzz'", "known are", "budgets")),
    ],
)
def test_a_bad_setting_is_named(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    message = refused(settings)
    for word in words:
        assert word in message


def test_data_must_be_named() -> None:
    with pytest.raises(ExperimentError, match="data is missing; give a folder"):
        make_experiment({"rounds": 3})


def test_dashes_and_whole_numbers_are_taken_as_toml_writes_them() -> None:
    experiment = make_experiment(
        {"data": "digits", "batch-size": 16, "alpha": 1, "budgets": [2, 4.5], "clients": 2}
    )
    assert experiment.batch_size == 16
    assert experiment.budgets == (2.0, 4.5)
    assert isinstance(experiment.alpha, float)


@pytest.mark.parametrize(
    ("share", "clients", "expected"), [(0.5, 10, 5), (0.5, 5, 3), (0.01, 10, 1), (1, 7, 7), (0.25, 2, 1)]
)
def test_participation_rounds_to_at_least_one(share: float, clients: int, expected: int) -> None:
    experiment = Experiment("digits", budgets=(4.0,) * clients, participation=share)
    assert experiment.clients_per_round == expected


def test_labels_tell_all_runs_of_a_comparison_apart() -> None:
    experiments = [Experiment("digits", method=method, profile=p) for method in METHODS for p in PROFILES]
    experiments += [Experiment("digits", ablation=a, profile="paper") for a in ABLATIONS]
    experiments += [Experiment("digits", ablation=a, profile="best") for a in ("aqfl", "all")]
    labels: dict[str, set[object]] = {}
    for one in experiments:
        what = (one.method, one.recipe()) if one.method in QUANTIZED_METHODS else (one.method,)
        labels.setdefault(one.label, set()).add(repr(what))
    assert all(len(different) == 1 for different in labels.values())
    assert {
        "fedmpq-paper",
        "fedmpq-best",
        "fedmpq-paper-msb",
        "fedmpq-best-aqfl",
        "aqfl-paper",
        "fpq8-best",
        "fp32",
    } <= labels.keys()


def test_the_recipe_is_the_methods_with_its_overrides() -> None:
    base = {"data": "digits", "epochs": 3, "rounds": 9}
    paper, plan = {**base, "profile": "paper", "lasso": 0.5}, TrainingPlan(lasso=0.5, epochs=3)
    constant = Schedule("constant", 9, 0)
    assert make_experiment({**paper, "method": "aqfl"}).recipe() == replace(
        aqfl("paper", plan), schedule=constant
    )
    assert make_experiment({**paper, "ablation": "msb"}).recipe() == replace(
        ablated("paper", plan, "msb"), schedule=constant
    )
    plan = TrainingPlan(epochs=3, momentum_bits=8, logit_adjustment=1.0)
    cosine = Schedule("cosine", 9, 0)
    assert make_experiment({**base, "method": "fpq8"}).recipe() == replace(
        fpq8("best", plan), schedule=cosine
    )
    assert make_experiment({**base, "ablation": "aqfl"}).recipe() == replace(
        ablated("best", plan, "aqfl"), schedule=cosine
    )
    own = make_experiment(
        {**paper, "step_rule": "least_error", "merge": "deltas", "deal": "full", "per_channel": True}
    )
    recipe = own.recipe()
    assert (recipe.step_rule, recipe.merge, recipe.deal) == ("least_error", "deltas", "full")
    assert recipe.per_channel


def test_averaging_and_statistics_are_the_profiles_unless_they_are_set() -> None:
    def choice(**settings: Any) -> tuple[float, str]:
        experiment = make_experiment({"data": "digits", **settings})
        recipe = experiment.recipe()
        assert experiment.calibrates == (recipe.statistics == "calibrated")
        return recipe.averaging, recipe.statistics

    best = fedmpq("best", TrainingPlan())
    assert choice(profile="paper") == (0.0, "averaged")
    assert choice() == choice(profile="best") == (best.averaging, best.statistics)
    assert best.averaging == 4.0
    assert best.statistics == "calibrated"
    assert choice(profile="best", averaging=0.5, statistics="averaged") == (0.5, "averaged")
    # Nothing is not the same as not said.
    assert choice(profile="best", averaging=0) == (0.0, "calibrated")
    assert choice(profile="paper", averaging=0.5, statistics="calibrated") == (0.5, "calibrated")
    assert choice(profile="best", method="aqfl", averaging=0.25) == (0.25, "calibrated")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("profile", PROFILES)
def test_only_what_trains_in_integers_has_a_profile(method: str, profile: str) -> None:
    """Full precision is trained as the paper does it, whatever the profile that is the default."""
    plain = make_experiment({"data": "digits", "method": method, "profile": profile, "rounds": 6})
    best = method in QUANTIZED_METHODS and profile == "best"
    assert plain.calibrates == best
    assert plain.rates() == Schedule("cosine" if best else "constant", 6, 0)
    assert plain.plan().momentum_bits == (8 if best else 32)
    own = make_experiment(
        {**plain.to_dict(), "statistics": "calibrated", "schedule": "steps", "warmup": 2, "momentum_bits": 0}
    )
    assert own.calibrates
    assert (own.rates(), own.plan().momentum_bits) == (Schedule("steps", 6, 2), 0)


def test_activations_are_quantized_only_where_weights_are() -> None:
    bits = {method: Experiment("digits", method=method).activation_bits for method in METHODS}
    assert bits == {"fedmpq": 4, "aqfl": 4, "fpq8": 8, "fp32": None, "fedpaq": None, "uveqfed": None}


PROFILE_SETTINGS = st.fixed_dictionaries({"profile": st.just("best")}) | st.fixed_dictionaries(
    {
        "profile": st.just("paper"),
        "merge": st.none() | st.sampled_from(["models", "deltas"]),
        "lasso": st.none() | st.floats(0, 1),
        "prune_density": st.none() | st.floats(0, 1),
    }
)


@given(
    PROFILE_SETTINGS,
    st.builds(
        Experiment,
        data=st.text(min_size=1),
        method=st.sampled_from(QUANTIZED_METHODS),
        budgets=st.lists(st.floats(1, 8), min_size=1, max_size=12).map(tuple),
        alpha=st.one_of(st.floats(1e-3, 1e6), st.just(math.inf)),
        rounds=st.integers(1, 10**9),
        seed=st.integers(0, 2**32 - 1),
        size=st.none() | st.integers(1, 4096),
        learning_rate=st.floats(1e-9, 1e9),
        flip=st.booleans(),
        averaging=st.none() | st.floats(0, 100),
        statistics=st.none() | st.sampled_from(get_args(Statistics)),
        schedule=st.none() | st.sampled_from(get_args(ScheduleKind)),
        momentum_bits=st.none() | st.sampled_from([0, 8, 32]),
        evaluate_every=st.integers(1, 100),
    ),
)
def test_an_experiment_survives_strict_json(settings: dict[str, Any], experiment: Experiment) -> None:
    experiment = replace(experiment, **settings)
    text = json.dumps(experiment.to_dict(), allow_nan=False)
    assert make_experiment(json.loads(text)) == experiment


def test_every_setting_can_come_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'data = "digits"\nmodel = "digits_cnn"\nmethod = "fpq8"\nbudgets = [2, 4]\nclients = 2\nalpha = inf\n'
        "learning-rate = 1\nflip = true\nseed = 7\naveraging = 0.5\nstatistics = 'averaged'\nwarmup = 2\n"
    )
    experiment = make_experiment(read_toml(path))
    assert experiment == Experiment(
        "digits",
        method="fpq8",
        model="digits_cnn",
        budgets=(2, 4),
        alpha=math.inf,
        learning_rate=1,
        flip=True,
        seed=7,
        averaging=0.5,
        statistics="averaged",
        warmup=2,
    )
    every = {name: value for name, value in Experiment("digits").to_dict().items() if value is not None}
    lines = [f"{name} = {json.dumps(value)}" for name, value in every.items()]
    path.write_text("\n".join(lines))
    assert make_experiment(read_toml(path)) == Experiment("digits")


def test_bad_toml_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    cases = {
        b"rounds = ": "is not valid TOML",
        b"\xff = 1": "is not valid TOML",
        b"[training]\nrounds = 3": r"\[training\] is a table",
    }
    for content, message in cases.items():
        path.write_bytes(content)
        with pytest.raises(ExperimentError, match=message) as caught:
            read_toml(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    for missing in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ExperimentError, match="cannot read"):
            read_toml(missing)


@pytest.mark.parametrize(
    ("changes", "factor"),
    [({"profile": "best"}, 2.0), ({"profile": "paper"}, 1.0), ({"profile": "best", "first_clips": 1.5}, 1.5)],
)
def test_clips_begin_where_the_profile_or_the_setting_says(changes: dict[str, Any], factor: float) -> None:
    prepared = prepare(make_experiment({**SMALL, **changes}))
    clips = [
        float(prepared.start.model.side[f"{node.name}.clip"])
        for node in prepared.start.graph.nodes
        if isinstance(node.op, Quantize) and not node.op.signed
    ]
    assert clips, "the network rounds activations"
    assert all(clip in (3 * factor, 4 * factor) for clip in clips)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), 1001.0, float("inf")])
def test_clips_that_begin_nowhere_are_refused(wrong: float) -> None:
    with pytest.raises(ExperimentError, match=r"first_clips = .* is outside 0 < first_clips <= 1000"):
        make_experiment({**SMALL, "first_clips": wrong})
