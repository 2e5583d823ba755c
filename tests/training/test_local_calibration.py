"""A client's calibration: what it measures on which images, what it gives back, and when it stops."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import (
    Assignment,
    Calibration,
    TrainingPlan,
    pack_layers,
    rounded_side,
    that_fit_half,
)
from fedmpq.model.calibration import calibration_batches, measure, statistics_names
from fedmpq.model.quantized import Side
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import TrainingError, WorkStopped
from fedmpq.training.local_calibration import run_calibration
from tools.rounds import HEAVY

ROOT = Path(__file__).resolve().parents[2]
PLAN = TrainingPlan(batch_size=8, update="carried")
Made = Callable[..., Any]


def assigned(model: Any, plan: TrainingPlan = PLAN, **key: int) -> Assignment:
    key = {"seed": 5, "round": 4, "client": 7, **key}
    return Assignment(**key, layers=pack_layers(model.layers), side=model.side, plan=plan)


def same(one: Side, other: Side) -> bool:
    return all(one[name].tobytes() == other[name].tobytes() for name in one.keys() | other.keys())


@pytest.mark.parametrize("side_bits", [16, 32])
def test_it_measures_the_model_it_was_sent_on_its_own_images(
    make_model: Made, make_data: Made, side_bits: int
) -> None:
    model, data = make_model(bits=3), make_data(21)
    found = run_calibration(model.graph, assigned(model, replace(PLAN, side_bits=side_bits)), data)
    assert (found.round, found.client, found.samples) == (4, 7, 21)
    assert sorted(found.statistics) == sorted(statistics_names(model.graph))
    batches = list(calibration_batches(Draws(5, 7, 4), 8, data.images))
    assert [len(batch) for batch in batches] == [8, 8, 5]
    expected = measure(model.graph, model.layers, model.side, batches)
    assert same(found.statistics, rounded_side(expected, side_bits))
    assert (that_fit_half(found.statistics) == found.statistics.keys()) == (side_bits == 16)


def test_it_counts_all_its_samples_though_it_measures_few(make_model: Made, make_data: Made) -> None:
    """Which ones is the draw of the round, and the labels are no part of it."""
    model, data = make_model(), make_data(700)

    def run(data: Dataset = data, threads: int = 1, **key: int) -> Calibration:
        plan = replace(PLAN, batch_size=64, side_bits=32)
        return run_calibration(model.graph, assigned(model, plan, **key), data, threads)

    first = run()
    assert first.samples == 700
    assert same(first.statistics, run().statistics)
    assert same(first.statistics, run(threads=2).statistics)
    assert same(first.statistics, run(replace(data, labels=data.labels[::-1].copy())).statistics)
    for other in (run(seed=1), run(client=1), run(round=1)):
        assert not same(first.statistics, other.statistics)
    for norm in ("stem_norm", "depthwise_norm"):
        spread = np.sqrt(first.statistics[f"{norm}.running_var"])
        means = (each.statistics[f"{norm}.running_mean"] for each in (first, run(seed=1)))
        assert np.abs(np.subtract(*means) / spread).max() < 0.1


class Counted(threading.Event):
    """Set once it has been asked so many times."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.left = answers

    def is_set(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("batches", [0, 1, 2])
def test_it_stops_before_any_batch(make_model: Made, make_data: Made, batches: int) -> None:
    model, stop = make_model(), Counted(batches)
    with pytest.raises(WorkStopped):
        run_calibration(model.graph, assigned(model), make_data(24), stop=stop)
    assert stop.left == -1


def test_it_ends_when_it_is_not_stopped(make_model: Made, make_data: Made) -> None:
    model, stop = make_model(), Counted(3)
    plain = run_calibration(model.graph, assigned(model), make_data(24))
    found = run_calibration(model.graph, assigned(model), make_data(24), stop=stop)
    assert stop.left == 0
    assert same(found.statistics, plain.statistics)


def test_data_that_the_model_cannot_read_are_refused(make_model: Made, make_data: Made) -> None:
    model = make_model()
    with pytest.raises(TrainingError, match=r"client 7 has 1 samples; .* at least 2"):
        run_calibration(model.graph, assigned(model), make_data(1))
    grey = Dataset(np.zeros((4, 6, 5, 1), np.uint8), np.zeros(4, np.int64), ("a",))
    with pytest.raises(TrainingError, match=r"client 7 has images of \(6, 5, 1\)"):
        run_calibration(model.graph, assigned(model), grey)


SCRIPT = """
import sys
from fedmpq.training.local_calibration import run_calibration
from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Assignment, TrainingPlan, pack_layers
from tests.training.small_graphs import GRAPHS, random_batch, random_state

graph = GRAPHS["pools"]()
layers, side = random_state(graph)
assignment = Assignment(0, 1, 2, pack_layers(layers), side, TrainingPlan(batch_size=4))
found = run_calibration(graph, assignment, Dataset(*random_batch(graph, 9), tuple("abcde")), 2)
print(len(found.statistics), *(name for name in sys.argv[1:] if name in sys.modules))
"""


def test_it_needs_no_torch() -> None:
    command = [sys.executable, "-c", SCRIPT, *HEAVY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["6"]
