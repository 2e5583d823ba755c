"""A board and tasks beside classification: its data, what it measures, and what it takes."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedmpq.data.dataset import DataError, Dataset
from fedmpq.data.fitting import Form
from fedmpq.edge_client.board_data import HeldData, NamedData
from fedmpq.edge_client.round_work import evaluate
from fedmpq.exchange.messages import Assignment, Evaluation, TrainingPlan, pack_layers
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import INPUT, Flatten, Graph
from fedmpq.model.task import Task
from fedmpq.training.needs import training_needs
from tests.training.small_graphs import Net, random_state

IMAGES = np.random.default_rng(0).integers(0, 256, (70, 2, 2, 3)).astype(np.uint8)
TARGETS = np.random.default_rng(1).integers(0, 2, (70, 12)).astype(np.float32)
NAMES = tuple(map(str, range(12)))


def network(task: Task) -> Graph:
    net = Net(3, 2, 2)
    return replace(net.graph(net.linear(net.add(Flatten(), INPUT), 8, relu=0.0), outputs=12), task=task)


@pytest.mark.parametrize("task", ["classification", "multi_label", "regression", "reconstruction"])
def test_a_board_measures_what_it_was_sent(task: Task) -> None:
    graph = network(task)
    layers, side = random_state(graph, bits=(8,))
    order = Assignment(0, 1, 2, pack_layers(layers), side, TrainingPlan())
    targets = TARGETS if task in ("multi_label", "regression") else None
    data = Dataset(IMAGES, np.arange(70) % 12, NAMES, targets=targets)
    score = (
        DeployedModel(graph, layers, side).score(IMAGES, data.labels if targets is None else targets).value
    )
    found = evaluate(graph, order, data, 1, threading.Event())
    if task == "classification":
        assert found == Evaluation(70, round(70 * score))
        assert found.value == score
    else:
        assert (found.samples, found.correct) == (70, 0)
        # Batches of another size add up in another order.
        assert found.value == pytest.approx(score)


def test_anomalies_of_a_board_are_measured_and_not_trained_on() -> None:
    held = HeldData(Dataset(IMAGES, np.arange(70) % 2, ("anomaly", "normal")))
    data = held.load(Form(2, 2, 3, task="reconstruction"), ("normal",))
    assert (len(data.train), len(data.evaluation)) == (35, 70)
    assert (data.train.labels == 1).all()


def test_a_board_says_what_its_data_lack(tmp_path: Path) -> None:
    np.savez(tmp_path / "labels.npz", images=IMAGES, labels=np.arange(70) % 3, class_names=["a", "b", "c"])
    np.savez(tmp_path / "targets.npz", images=IMAGES, targets=TARGETS[:, :2])
    labels, targets = NamedData(str(tmp_path / "labels.npz")), NamedData(str(tmp_path / "targets.npz"))
    with pytest.raises(DataError, match="classes such as 'a' and no targets: regression needs"):
        labels.load(Form(2, 2, 3, task="regression"), ("x",))
    with pytest.raises(DataError, match="2 targets each: classification needs a class"):
        targets.load(Form(2, 2, 3), ("a", "b", "c"))
    with pytest.raises(DataError, match=r"have 2 targets each .* the model 3"):
        targets.load(Form(2, 2, 3, task="regression"), ("x", "y", "z"))
    assert targets.load(Form(2, 2, 3, task="regression"), ("x", "y")).train.class_names == ("x", "y")


def test_targets_take_memory_too() -> None:
    plan = TrainingPlan(batch_size=16)
    needs = [training_needs(network(task), plan, 70, 1).memory for task in ("classification", "regression")]
    assert needs[1] - needs[0] == 12 * 16 * 12
