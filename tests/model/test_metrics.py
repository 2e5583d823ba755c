"""Metrics against scikit-learn's, in one piece and batch by batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn import metrics as sklearn

from fedmpq.model.graph import INPUT, Flatten, Graph, Input, Linear, Node
from fedmpq.model.metrics import METRICS, Judge, Score, auroc, metric_named, score_of
from fedmpq.model.task import TASKS, Answers, Task, input_values

SEEDS = st.integers(0, 2**32 - 1)
IMAGE = Input(2, 2, 3, 0.03125, 100)
VALUES = 12


def graph(task: Task, outputs: int = VALUES) -> Graph:
    nodes = (Node("flat", Flatten(), (INPUT,)), Node("fc", Linear(VALUES, outputs, True), ("flat",)))
    return Graph("small", IMAGE, nodes, "fc", task)


def images(count: int, random: np.random.Generator) -> NDArray[np.uint8]:
    return random.integers(0, 256, (count, 2, 3, 2)).astype(np.uint8)


def scored(made: Graph, outputs: NDArray[Any], answers: Answers) -> Score:
    return score_of(made, outputs, np.zeros((len(outputs), 2, 3, 2), np.uint8), answers)


@given(st.integers(2, 40), st.integers(1, 5), SEEDS)
def test_of_labels(samples: int, outputs: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(size=(samples, outputs)).astype(np.float32)
    targets = (random.normal(size=(samples, outputs)) > 0.3).astype(np.float32)
    score = scored(graph("multi_label", outputs), logits, targets)
    counted = (targets.any(axis=0)) | (logits > 0).any(axis=0)
    each = [sklearn.f1_score(targets[:, k], logits[:, k] > 0) for k in np.flatnonzero(counted)]
    assert score.value == pytest.approx(np.mean(each) if each else 1.0)
    assert score.others["label_accuracy"] == pytest.approx(np.mean((logits > 0) == (targets == 1)))
    both = [k for k in range(outputs) if 0 < targets[:, k].sum() < samples]
    assert ("auroc" in score.others) == bool(both)
    if both:
        areas = [sklearn.roc_auc_score(targets[:, k], logits[:, k]) for k in both]
        assert score.others["auroc"] == pytest.approx(np.mean(areas))


@given(st.integers(2, 40), st.integers(1, 5), st.floats(-1e3, 1e3), SEEDS)
def test_of_values(samples: int, outputs: int, middle: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    targets = (middle + random.normal(size=(samples, outputs))).astype(np.float32)
    found = (targets + random.normal(0, 0.5, targets.shape)).astype(np.float32)
    score = scored(graph("regression", outputs), found, targets)
    expected = sklearn.r2_score(targets.astype(float), found.astype(float), multioutput="variance_weighted")
    assert score.value == pytest.approx(max(-1.0, expected), abs=1e-5)
    assert score.others["mae"] == pytest.approx(sklearn.mean_absolute_error(targets, found), rel=1e-4)
    assert score.others["rmse"] == pytest.approx(sklearn.mean_squared_error(targets, found) ** 0.5, rel=1e-4)


def test_of_values_that_do_not_vary() -> None:
    made, same = graph("regression", 1), np.full((5, 1), 7, np.float32)
    assert scored(made, same, same).value == 1.0
    assert scored(made, same + 1, same).value == -1.0


@given(st.integers(1, 40), SEEDS)
def test_of_classes(samples: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    logits, labels = random.normal(size=(samples, 3)), random.integers(0, 3, samples)
    score = scored(graph("classification", 3), logits, labels)
    assert score == Score(float(np.mean(logits.argmax(axis=1) == labels)))


@given(st.integers(4, 40), SEEDS)
def test_of_reconstructions(samples: int, seed: int) -> None:
    """Anomalies count in AUROC alone."""
    random = np.random.default_rng(seed)
    made, pixels = graph("reconstruction"), images(samples, random)
    anomalous = random.permutation(samples) < samples // 2
    values = input_values(IMAGE.scale, IMAGE.zero_point, pixels)
    outputs = (values + random.normal(0, 0.3, values.shape) * (1 + anomalous[:, None])).astype(np.float32)
    score = score_of(made, outputs, pixels, np.zeros(samples, np.int64), anomalous)
    normal = ~anomalous
    # Not scikit-learn's, which leaves out the errors of values that are the same in all samples.
    spread = np.square(values[normal] - values[normal].mean(axis=0)).sum()
    expected = 1 - np.square(outputs[normal] - values[normal]).sum() / spread
    assert score.value == pytest.approx(max(-1.0, expected), abs=1e-5)
    assert score.others["mse"] == pytest.approx(
        sklearn.mean_squared_error(values[normal], outputs[normal]), rel=1e-4
    )
    errors = ((outputs.astype(float) - values) ** 2).mean(axis=1)
    assert score.others["auroc"] == pytest.approx(sklearn.roc_auc_score(anomalous, errors))
    assert "auroc" not in score_of(made, outputs, pixels, np.zeros(samples, np.int64)).others


def test_input_values_are_in_torchs_order() -> None:
    codes = np.arange(12, dtype=np.uint8).reshape(1, 2, 3, 2)
    expected = [
        0.03125 * (codes[0, row, column, channel] - 100.0)
        for channel in range(2)
        for row in range(2)
        for column in range(3)
    ]
    np.testing.assert_allclose(input_values(IMAGE.scale, IMAGE.zero_point, codes)[0], expected, rtol=1e-6)


@given(st.integers(2, 60), st.integers(0, 4), SEEDS)
def test_auroc_with_ties(samples: int, decimals: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    positive = random.permutation(samples) < max(1, samples // 3)
    scores = np.round(random.normal(size=samples), decimals)
    assert auroc(scores, positive) == pytest.approx(sklearn.roc_auc_score(positive, scores))
    assert auroc(scores, np.ones(samples, np.bool_)) is None


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("cut", [1, 7])
def test_a_score_is_the_same_in_batches(task: Task, cut: int) -> None:
    random = np.random.default_rng(3)
    made, pixels = graph(task), images(20, random)
    outputs = random.normal(size=(20, VALUES)).astype(np.float32)
    targets = (random.normal(size=(20, VALUES)) > 0).astype(np.float32)
    given = random.integers(0, VALUES, 20) if task == "classification" else targets
    judge = Judge(made)
    for start in range(0, 20, cut):
        rows = slice(start, start + cut)
        judge.add(outputs[rows], pixels[rows], given[rows])
    whole = score_of(made, outputs, pixels, given)
    assert judge.score().value == pytest.approx(whole.value)
    assert judge.score().others == pytest.approx(whole.others)


def test_how_people_read_them() -> None:
    assert METRICS["classification"].text(0.912) == "91.2%"
    assert (METRICS["regression"].text(0.912), METRICS["regression"].heading) == ("0.912", "R²")
    assert metric_named("").key == "accuracy"
    assert metric_named("f1") == METRICS["multi_label"]
    assert metric_named("of a newer version").text(0.5) == "0.500"
    assert replace(METRICS["multi_label"], is_share=False).factor == 1
