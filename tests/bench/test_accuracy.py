"""The bench of the engines' accuracy: the runs it makes and what it says of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.accuracy import Run, Settings, summary

ROOT = Path(__file__).parents[2]
SETTINGS = Settings("digits_cnn", 4, 12, 64, 0.2, 0.1, 4, 1)


def test_the_last_quarter_of_the_epochs_has_a_tenth_of_the_rates() -> None:
    first, last = SETTINGS.phases("carried")
    assert (first.epochs, last.epochs) == (9, 3)
    assert last.learning_rate == pytest.approx(first.learning_rate / 10)
    assert last.code_learning_rate == pytest.approx(first.code_learning_rate / 10)


def test_a_summary_is_over_the_seeds() -> None:
    runs = [Run("native", "paper", seed, 40.0 + 2 * seed, 50.0, 1.0) for seed in range(3)]
    runs.append(Run("torch", "paper", 0, 10.0, 50.0, 1.0))
    assert summary(runs) == [
        {"update": "paper", "engine": "native", "seeds": 3, "mean": 42.0, "deviation": 2.0},
        {"update": "paper", "engine": "torch", "seeds": 1, "mean": 10.0, "deviation": 0.0},
    ]


def test_json_holds_every_run() -> None:
    options = "--data digits --model digits_cnn --images 300 --epochs 8 --pad 0 --seeds 2 --json"
    options += " --updates carried --engines native"
    command = [sys.executable, "-m", "bench.accuracy", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert [(run["engine"], run["seed"]) for run in report["runs"]] == [("native", 0), ("native", 1)]
    assert report["summary"][0]["mean"] > 30  # chance is 10
    assert report["images"] == 300
