"""A run's settings: what a TOML file may say, and what it is told when it says something else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fedmpq.data.fitting import Form
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.method.recipe import fedmpq
from fedmpq.method.schedule import Schedule
from fedmpq.server.run_config import (
    ConfigError,
    RunConfig,
    difference,
    images_of,
    load_calibration_data,
    load_test_data,
    make_config,
    parse_config,
    read_config,
)
from tests.data.files import pixels, save_image

PLAIN = {
    "name": "plain",
    "clients_per_round": 4,
    "image": [8, 8, 1],
    "classes": 10,
    "input_scale": 0.1,
    "input_zero_point": 3,
}


def config(**settings: object) -> RunConfig:
    values = {**PLAIN, **settings}
    return make_config({name: value for name, value in values.items() if value is not None})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"round": 5}, "no setting 'round'; did you mean 'rounds'"),
        ({"name": None}, "name is missing"),
        ({"name": "a b"}, "letters, digits"),
        ({"rounds": 0}, "rounds = 0 is too small"),
        ({"rounds": "5"}, "not a whole number"),
        ({"rounds": True}, "not a whole number"),
        ({"flip": 1}, "not true or false"),
        ({"method": "fedavg"}, "none of fedmpq, aqfl, fpq8"),
        ({"method": "fp32"}, "method = .fp32. trains in full precision, for which boards have no engine"),
        ({"method": "aqf"}, "did you mean 'aqfl'"),
        ({"method": "aqfl", "deal": "full"}, "goes with method fedmpq"),
        ({"clients_per_round": None}, "clients_per_round .* or participation"),
        ({"participation": 0.5}, "not both"),
        ({"clients_per_round": None, "participation": 0.5}, "needs min_clients"),
        ({"min_clients": 3}, "below clients_per_round = 4"),
        ({"quorum": 0.0}, "quorum = 0.0 is outside"),
        ({"quorum": 1.5}, "quorum = 1.5 is outside"),
        ({"quorum": math.nan}, "outside"),
        ({"over_selection": -0.1}, "outside 0..10"),
        ({"deadline_seconds": -1}, "outside"),
        ({"max_update_norm": 0}, "outside"),
        ({"seed": 2**32}, "outside 0.."),
        ({"learning_rate": 0}, "learning_rate = 0.0 must be positive"),
        ({"side_bits": 8}, "side_bits = 8"),
        ({"image": [8, 8]}, "not \\[height, width, channels\\]"),
        ({"image": "8x8"}, "not a list of whole numbers"),
        ({"image": None}, "give image = "),
        ({"classes": None}, "give class_names or classes"),
        ({"classes": 3, "class_names": ["a", "b"]}, "class_names has 2"),
        ({"class_names": ["a", "a"], "classes": None}, "twice"),
        ({"input_scale": None}, "give input_scale and input_zero_point"),
        ({"input_zero_point": 256}, "outside 0..255"),
        ({"keep_models": 0}, "keep_models = 0 is too small"),
        ({"asynchronous": 5}, "asynchronous = 5 is above clients_per_round = 4.* lower it"),
        ({"asynchronous": 7, "min_clients": 6}, "asynchronous = 7 is above min_clients = 6"),
        ({"asynchronous": 0}, "asynchronous = 0 is too small"),
        ({"asynchronous": 2, "over_selection": 0.5}, "over_selection = 0.5 does not go with asynchronous"),
        ({"asynchronous": 2, "quorum": 0.5}, "quorum = 0.5 does not go with asynchronous"),
        ({"asynchronous": 2, "aggregation": "krum"}, "aggregation = 'krum' does not go with asynchronous"),
        ({"asynchronous": 2, "profile": "paper"}, "merge = 'models' does not go with asynchronous"),
        ({"learning_rate": 1e39}, r"learning_rate = 1e\+39 is beyond single precision"),
        ({"averaging": 101}, "averaging = 101.0 is outside 0..100: below 1 a decay, from 1 on a power"),
        ({"averaging": -0.1}, "averaging = -0.1 is outside"),
        ({"averaging": math.nan}, "averaging = nan is outside"),
        ({"averaging": "0.5"}, "averaging = '0.5' is not a number"),
        ({"moved_statistics": True}, "no setting 'moved_statistics'; did you mean 'statistics'"),
        ({"statistics": "moved"}, "statistics = 'moved' is none of averaged, calibrated"),
        ({"schedule": "cosin"}, "schedule = 'cosin' is none of .* did you mean 'cosine'"),
        ({"warmup": -1}, "warmup = -1 is outside 0..49"),
        ({"warmup": 5, "rounds": 5}, "warmup = 5 is outside 0..4, the rounds before the last"),
        ({"lasso": 0.01}, "lasso = 0.01 goes with profile paper, not with best"),
        ({"prune_density": 0.03}, "prune_density = 0.03 goes with profile paper, not with best"),
        ({"ablation": "msb"}, "ablation = 'msb' goes with profile paper, not with best"),
        ({"merge": "models"}, "merge = 'models' goes with profile paper, not with best"),
        ({"calibration_seconds": 0}, r"calibration_seconds = 0.0 is outside 1..1e\+09"),
        (
            {"calibration_data": "x.npz", "profile": "paper"},
            "calibration_data goes with statistics = 'calibrated'",
        ),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


def test_a_file_gives_its_name_and_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "digits.toml"
    np.savez(tmp_path / "test.npz", x_test=np.zeros((4, 8, 8), np.uint8), y_test=np.arange(4))
    path.write_text('clients-per-round = 2\nlearning_rate = 1\ntest_data = "test.npz"\n')
    read = read_config(path)
    assert (read.name, read.clients_per_round, read.learning_rate) == ("digits", 2, 1.0)
    assert read.test_data == str((tmp_path / "test.npz").resolve())
    images = images_of(read, load_test_data(read))
    assert (images.format.height, images.format.width, images.format.channels) == (8, 8, 1)
    assert images.class_names == ("0", "1", "2", "3")


@pytest.mark.parametrize(("text", "message"), [("a = [", "not valid TOML"), ("[run]\nrounds = 1", "flat")])
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"bad.toml.*{message}"):
        read_config(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_config(tmp_path / "none.toml")


def test_averaging_and_statistics_are_the_profiles_unless_the_file_says(tmp_path: Path) -> None:
    def choice(*lines: str) -> tuple[float, str]:
        path = tmp_path / "run.toml"
        needed = [f"{name} = {json.dumps(value)}" for name, value in PLAIN.items()]
        path.write_text("\n".join((*needed, *lines)))
        read = read_config(path)
        assert read.calibrates == (read.recipe().statistics == "calibrated")
        return read.recipe().averaging, read.recipe().statistics

    assert choice('profile = "paper"') == (0.0, "averaged")
    best = fedmpq("best", TrainingPlan())
    assert choice() == choice('profile = "best"') == (best.averaging, "calibrated")
    assert choice("averaging = 0.5", 'statistics = "averaged"') == (0.5, "averaged")
    # Nothing is not the same as not said.
    assert choice("averaging = 0") == (0.0, "calibrated")
    given = 'profile = "paper"', "averaging = 0.5", 'statistics = "calibrated"'
    assert choice(*given) == (0.5, "calibrated")


def test_rates_lasso_and_momentum_are_the_profiles_unless_the_file_says() -> None:
    best, paper = config(rounds=8), config(rounds=8, profile="paper")
    assert (best.recipe().schedule, paper.recipe().schedule) == (
        Schedule("cosine", 8, 0),
        Schedule("constant", 8, 0),
    )
    assert config(rounds=8, schedule="steps", warmup=2).recipe().schedule == Schedule("steps", 8, 2)
    assert (best.plan().momentum_bits, paper.plan().momentum_bits) == (8, 32)
    assert config(momentum_bits=32).plan().momentum_bits == 32
    assert (best.plan().logit_adjustment, paper.plan().logit_adjustment) == (1.0, 0.0)
    assert config(logit_adjustment=0.0).plan().logit_adjustment == 0.0
    plan = paper.recipe().plan
    assert (plan.lasso, plan.prune_density) == (0.01, 0.03)
    own = config(profile="paper", lasso=0.0, prune_density=0.0, merge="deltas", ablation="msb").recipe()
    assert (own.plan.lasso, own.plan.prune_density, own.merge) == (0.0, 0.0, "deltas")


def test_only_what_is_evaluated_is_calibrated() -> None:
    made = config(rounds=5, evaluate_every=2)
    assert [made.calibrates_after(number) for number in range(1, 6)] == [False, True, False, True, True]
    paper = config(rounds=5, evaluate_every=2, profile="paper")
    assert not any(paper.calibrates_after(number) for number in range(1, 6))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_update_norm": "inf", "class_names": [str(n) for n in range(10)], "classes": None},
        {"averaging": 0.25, "statistics": "averaged", "schedule": "steps", "warmup": 3},
        {"profile": "paper", "lasso": 0.5, "prune_density": 0.25, "momentum_bits": 8},
        {"calibration_seconds": 1.5, "calibration_data": "some.npz"},
        {"logit_adjustment": 0.5},
    ],
)
def test_settings_survive_json(settings: dict[str, object]) -> None:
    original = config(**settings)
    assert make_config(json.loads(json.dumps(original.to_dict(), allow_nan=False))) == original


def test_a_changed_setting_is_told() -> None:
    assert difference(config(), config()) is None
    change = difference(config(), config(rounds=7))
    assert change == "rounds = 50 there and 7 here"


@pytest.mark.parametrize(
    ("settings", "connected", "target", "selected", "needed"),
    [
        ({"clients_per_round": 10}, 30, 10, 10, 10),
        ({"clients_per_round": 10, "over_selection": 0.1}, 30, 10, 11, 10),
        ({"clients_per_round": 10, "over_selection": 0.3}, 12, 10, 12, 10),
        ({"clients_per_round": 3, "quorum": 0.5}, 3, 3, 3, 2),
        ({"clients_per_round": 10, "quorum": 0.7}, 10, 10, 10, 7),
        ({"clients_per_round": None, "participation": 0.5, "min_clients": 1}, 5, 3, 3, 3),
        ({"clients_per_round": None, "participation": 0.1, "min_clients": 1}, 2, 1, 1, 1),
    ],
)
def test_how_many_take_part(
    settings: dict[str, object], connected: int, target: int, selected: int, needed: int
) -> None:
    made = config(**settings)
    assert made.target(connected) == target
    assert made.selected(target, connected) == selected
    assert made.needed(target) == needed


def test_test_data_must_fit(tmp_path: Path) -> None:
    file = tmp_path / "test.npz"
    np.savez(file, x_test=np.zeros((12, 8, 8), np.uint8), y_test=np.arange(12))
    made = config(test_data=str(file), classes=5)
    with pytest.raises(ConfigError, match="label 11"):
        images_of(made, load_test_data(made))
    more = config(test_data=str(file), classes=20)
    assert images_of(more, load_test_data(more)).class_names == tuple(str(n) for n in range(20))


def test_test_data_is_whatever_a_boards_data_may_be(tmp_path: Path) -> None:
    """A folder of photos of any size without a test split, whose classes the model has in another order."""
    for n, name in enumerate(("dog", "cat", "cat")):
        save_image(tmp_path / "photos" / name / f"{n}.png", pixels(4 + n, 6, 3))
    made = config(
        test_data=str(tmp_path / "photos"), image=[3, 3, 1], classes=3, class_names=["dog", "bee", "cat"]
    )
    test = load_test_data(made)
    assert test is not None
    assert test.labels.tolist() == [2, 2, 0]
    images = images_of(made, test)
    assert images.form == Form(3, 3, 1)
    again = load_test_data(made, images.form, images.class_names)
    assert again is not None
    assert np.array_equal(again.images, test.images)
    calibration = load_calibration_data(
        config(calibration_data=str(tmp_path / "photos"), profile="best"), Form(2, 2, 3)
    )
    assert calibration is not None
    assert calibration.images.shape == (3, 2, 2, 3)


def test_a_relative_path_starts_from_the_folder_given(tmp_path: Path) -> None:
    text = 'name = "x"\nclients_per_round = 1\ntest_data = "data/test.npz"\ncalibration_data = "more.npz"'
    read = parse_config(text, tmp_path)
    assert read.test_data == str(tmp_path.resolve() / "data/test.npz")
    assert read.calibration_data == str(tmp_path.resolve() / "more.npz")


def test_a_source_of_ones_own_is_no_path(tmp_path: Path) -> None:
    read = parse_config('name = "x"\nclients_per_round = 1\ntest_data = "garden.photos:Test"', tmp_path)
    assert read.test_data == "garden.photos:Test"
