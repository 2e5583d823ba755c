"""The frequencies of a client's classes in its loss: the formula, both engines, and what it is for."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import PlanError, TrainingPlan
from fedmpq.lab.experiment import ExperimentError, make_experiment
from fedmpq.model.graph import INPUT, Flatten, Graph, Linear
from fedmpq.model.integer_forward import logits
from fedmpq.model.integer_program import compile_program
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import make_engine
from fedmpq.training.label_prior import logit_shift
from fedmpq.training.local_round import run_local_round
from tests.training.small_graphs import Net, random_state
from tests.training.test_local_round import Recorder, assigned

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = 5
DRAWS = Draws(1, 2, 3)
PLAN = TrainingPlan(
    update="carried", learning_rate=0.5, momentum=0.0, momentum_bits=0, weight_decay=0.0, lasso=0.0
)


def network() -> Graph:
    net = Net(2, 3, 2)
    hidden = net.relu(net.add(Linear(12, 8, True), net.add(Flatten(), INPUT)))
    return net.graph(hidden, outputs=CLASSES)


def adjusted(strength: float) -> TrainingPlan:
    return replace(PLAN, logit_adjustment=strength)


@given(st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=200), st.floats(0.01, 4))
def test_the_shift_is_the_logarithm_of_each_share(labels: list[int], strength: float) -> None:
    found = logit_shift(network(), adjusted(strength), np.array(labels, np.int64))
    assert found is not None
    for number, shift in enumerate(found):
        share = (labels.count(number) + 1) * CLASSES / (len(labels) + CLASSES)
        assert shift == pytest.approx(strength * math.log(share), rel=1e-6, abs=1e-6)


def test_equal_frequencies_are_no_news() -> None:
    found = logit_shift(network(), adjusted(1.0), np.arange(10 * CLASSES, dtype=np.int64) % CLASSES)
    assert found is not None
    np.testing.assert_array_equal(found, np.zeros(CLASSES, np.float32))


def test_nothing_is_added_where_nothing_is_asked_for_or_there_are_no_classes() -> None:
    labels = np.zeros(4, np.int64)
    assert logit_shift(network(), PLAN, labels) is None
    assert logit_shift(replace(network(), task="regression"), adjusted(1.0), labels) is None


@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_step_has_the_loss_and_gradient_of_the_shifted_logits(name: str) -> None:
    graph = network()
    layers, side = random_state(graph, bits=(8,))
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (16, 3, 2, 2)).astype(np.uint8)
    labels = rng.integers(0, CLASSES, 16)
    shift = np.array([-3, 0, 2, 0.5, -0.25], np.float32)
    engine = make_engine(name, threads=1)
    engine.load(graph, layers, side, PLAN, DRAWS, shift)
    result = engine.train_epoch([(images, labels)])
    outputs = logits(compile_program(graph, layers, side), images).astype(np.float64) + shift
    shares = np.exp(outputs) / np.exp(outputs).sum(axis=1, keepdims=True)
    # The integer forward has its biases as multiples of the accumulators' scales.
    assert result.loss == pytest.approx(-np.log(shares[np.arange(16), labels]).mean(), rel=1e-3)
    assert result.accuracy == pytest.approx((outputs.argmax(axis=1) == labels).mean())
    shares[np.arange(16), labels] -= 1
    bias = f"{graph.output}.bias"
    moved = (side[bias] - engine.side()[bias]) / 0.5
    np.testing.assert_allclose(moved, shares.mean(axis=0), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["native", "torch"])
def test_the_next_client_has_a_shift_of_its_own(name: str) -> None:
    """An engine keeps what it has bound for the client before."""
    graph = network()
    layers, side = random_state(graph, bits=(4,))
    images = np.random.default_rng(1).integers(0, 256, (8, 3, 2, 2)).astype(np.uint8)
    labels = np.arange(8) % CLASSES
    kept, losses = make_engine(name, threads=1), []
    for shift in (np.arange(CLASSES, dtype=np.float32), None):
        fresh = make_engine(name, threads=1)
        for engine in (kept, fresh):
            engine.load(graph, layers, side, PLAN, DRAWS, shift)
        losses.append([engine.train_epoch([(images, labels)]).loss for engine in (kept, fresh)])
    assert losses[0][0] == losses[0][1] != losses[1][0] == losses[1][1]


def test_a_local_round_counts_the_clients_own_labels(make_model: Any) -> None:
    model, engine = make_model(), Recorder()
    labels = np.array([0, 0, 0, 1, 2, 0])
    shape = (6, model.graph.input.height, model.graph.input.width, model.graph.input.channels)
    data = Dataset(np.zeros(shape, np.uint8), labels, ("a", "b", "c"))
    run_local_round(engine, model.graph, assigned(model, adjusted(1.0)), data)
    assert engine.shift is not None
    np.testing.assert_array_equal(engine.shift, logit_shift(model.graph, adjusted(1.0), labels))


@pytest.mark.parametrize("strength", [-0.1, 4.5, math.nan, math.inf])
def test_a_strength_of_no_sense_is_refused(strength: float) -> None:
    with pytest.raises(PlanError, match=r"logit_adjustment = \S+ is outside 0\.\.4; 0 is none"):
        adjusted(strength)


def test_other_tasks_refuse_it_and_have_none_of_their_own() -> None:
    settings = {"data": "digits", "budgets": [4.0, 4.0], "task": "multi_label"}
    assert make_experiment(settings).plan().logit_adjustment == 0.0
    with pytest.raises(ExperimentError, match=r"logit_adjustment = 0\.5 goes with task classification"):
        make_experiment({**settings, "logit_adjustment": 0.5})
