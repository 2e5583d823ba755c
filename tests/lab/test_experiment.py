"""Settings: what is taken, what is refused and in which words, and the way through TOML and JSON and back."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.lab.experiment import (
    METHODS,
    PAPER_BUDGETS,
    Experiment,
    ExperimentError,
    make_experiment,
    read_toml,
)
from fedmpq.model.exchange import TrainingPlan
from fedmpq.server.recipe import ABLATIONS, PROFILES, QUANTIZED_METHODS, ablated, aqfl, fedmpq, fpq8


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
    assert (experiment.lasso, experiment.prune_density, experiment.alpha) == (0.01, 0.03, 0.5)
    assert (experiment.clients, experiment.clients_per_round) == (10, 5)


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
        ({"averaging": 1}, ("averaging = 1.0", "0 <= averaging < 1")),
        ({"averaging": -0.1}, ("averaging = -0.1", "0 <= averaging < 1")),
        ({"averaging": math.nan}, ("averaging = nan", "0 <= averaging < 1")),
        ({"averaging": "0.5"}, ("averaging = '0.5'", "number")),
        ({"averaging": True}, ("averaging = True", "number")),
        ({"averaging": 10**400}, ("averaging", "too large")),
        ({"moved_statistics": 0}, ("moved_statistics = 0", "true or false")),
        ({"moved_statistics": "no"}, ("moved_statistics = 'no'", "true or false")),
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
    experiments += [Experiment("digits", ablation=a, profile=p) for a in ABLATIONS for p in PROFILES]
    labels: dict[str, set[object]] = {}
    for one in experiments:
        what = (one.method, one.recipe()) if one.method in QUANTIZED_METHODS else (one.method,)
        labels.setdefault(one.label, set()).add(repr(what))
    assert all(len(different) == 1 for different in labels.values())
    assert {
        "fedmpq-paper",
        "fedmpq-best",
        "fedmpq-paper-msb",
        "aqfl-paper",
        "fpq8-best",
        "fp32",
    } <= labels.keys()


def test_the_recipe_is_the_methods_with_its_overrides() -> None:
    base = {"data": "digits", "lasso": 0.5, "epochs": 3}
    plan = TrainingPlan(lasso=0.5, epochs=3)
    paper = {**base, "profile": "paper"}
    assert make_experiment({**paper, "method": "aqfl"}).recipe() == aqfl("paper", plan)
    assert make_experiment({**base, "method": "fpq8", "profile": "best"}).recipe() == fpq8("best", plan)
    assert make_experiment({**paper, "ablation": "msb"}).recipe() == ablated("paper", plan, "msb")
    assert make_experiment({**base, "ablation": "msb"}).recipe() == ablated("best", plan, "msb")
    own = make_experiment(
        {**paper, "step_rule": "least_error", "merge": "deltas", "deal": "full", "per_channel": True}
    )
    recipe = own.recipe()
    assert (recipe.step_rule, recipe.merge, recipe.deal) == ("least_error", "deltas", "full")
    assert recipe.per_channel


def test_averaging_and_moved_statistics_are_the_profiles_unless_they_are_set() -> None:
    def choice(**settings: Any) -> tuple[float, bool]:
        recipe = make_experiment({"data": "digits", **settings}).recipe()
        return recipe.averaging, recipe.moved_statistics

    best = fedmpq("best", TrainingPlan())
    assert choice(profile="paper") == (0.0, False)
    assert choice() == choice(profile="best") == (best.averaging, best.moved_statistics)
    assert 0 < best.averaging < 1
    assert best.moved_statistics
    assert choice(profile="best", averaging=0.5, moved_statistics=False) == (0.5, False)
    # Nothing is not the same as not said.
    assert choice(profile="best", averaging=0) == (0.0, True)
    assert choice(profile="paper", averaging=0.5, moved_statistics=True) == (0.5, True)
    assert choice(profile="best", method="aqfl", averaging=0.25) == (0.25, True)


def test_activations_are_quantized_only_where_weights_are() -> None:
    bits = {method: Experiment("digits", method=method).activation_bits for method in METHODS}
    assert bits == {"fedmpq": 4, "aqfl": 4, "fpq8": 8, "fp32": None, "fedpaq": None, "uveqfed": None}


@given(
    st.builds(
        Experiment,
        data=st.text(min_size=1),
        method=st.sampled_from(QUANTIZED_METHODS),
        profile=st.sampled_from(PROFILES),
        budgets=st.lists(st.floats(1, 8), min_size=1, max_size=12).map(tuple),
        alpha=st.one_of(st.floats(1e-3, 1e6), st.just(math.inf)),
        rounds=st.integers(1, 10**9),
        seed=st.integers(0, 2**32 - 1),
        size=st.none() | st.integers(1, 4096),
        learning_rate=st.floats(1e-9, 1e9),
        flip=st.booleans(),
        merge=st.none() | st.sampled_from(["models", "deltas"]),
        averaging=st.none() | st.floats(0, 1, exclude_max=True),
        moved_statistics=st.none() | st.booleans(),
        evaluate_every=st.integers(1, 100),
    )
)
def test_an_experiment_survives_strict_json(experiment: Experiment) -> None:
    text = json.dumps(experiment.to_dict(), allow_nan=False)
    assert make_experiment(json.loads(text)) == experiment


def test_every_setting_can_come_from_toml(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'data = "digits"\nmodel = "digits_cnn"\nmethod = "fpq8"\nbudgets = [2, 4]\nclients = 2\nalpha = inf\n'
        "learning-rate = 1\nflip = true\nseed = 7\naveraging = 0.5\nmoved-statistics = false\n"
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
        moved_statistics=False,
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
