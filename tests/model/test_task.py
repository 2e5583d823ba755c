"""A graph's task: on the wire, in its checks, and in what outputs are compared with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedmpq.data import tasks
from fedmpq.model import graph_wire
from fedmpq.model.graph import INPUT, Flatten, Graph, GraphError, Input, Linear, Node
from fedmpq.model.task import TASKS, Task, answer_problem, answers_of, outputs_of
from fedmpq.proto import graph_pb2

IMAGE = Input(3, 2, 2, 0.5, 10)


def graph(outputs: int = 12, task: Task = "classification", frozen: bool = False) -> Graph:
    nodes = (Node("flat", Flatten(), (INPUT,)), Node("fc", Linear(12, outputs, True), ("flat",), frozen))
    return Graph("small", IMAGE, nodes, "fc", task)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_task_crosses_the_wire(task: Task, frozen: bool) -> None:
    made = graph(task=task, frozen=frozen)
    assert Graph.from_bytes(made.to_bytes()) == made
    version = graph_pb2.Graph.FromString(made.to_bytes()).format_version
    assert version == (3 if task != "classification" else 2 if frozen else 1)


def test_a_classification_is_written_as_ever() -> None:
    """No field of the task: bytes and hashes of what there was before stay."""
    message = graph_pb2.Graph.FromString(graph().to_bytes())
    assert [field.name for field, _ in message.ListFields()] == [
        "format_version",
        "name",
        "input",
        "nodes",
        "output",
    ]


def test_tasks_have_different_hashes() -> None:
    assert len({graph(task=task).id for task in TASKS}) == len(TASKS)


def test_who_knows_no_tasks_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = graph(task="regression").to_bytes()
    monkeypatch.setattr(graph_wire, "FORMAT_VERSIONS", (1, 2))
    with pytest.raises(GraphError, match="format version 3, this fedmpq reads 1 and 2: update"):
        Graph.from_bytes(sent)


def test_a_task_of_a_newer_version_is_refused() -> None:
    message = graph_pb2.Graph.FromString(graph(task="regression").to_bytes())
    message.task = 9  # type: ignore[assignment]
    with pytest.raises(GraphError, match="task 9, unknown"):
        Graph.from_bytes(message.SerializeToString())


def test_a_reconstruction_has_as_many_outputs_as_inputs() -> None:
    assert graph(12, "reconstruction").task == "reconstruction"
    with pytest.raises(GraphError, match="11 values, the input 12"):
        graph(11, "reconstruction")
    with pytest.raises(GraphError, match="'guessing' is none of classification"):
        replace(graph(), task="guessing")  # type: ignore[arg-type]


def test_outputs() -> None:
    assert [outputs_of(task, 5, (4, 3, 2)) for task in TASKS] == [5, 5, 5, 24]


def test_the_data_know_the_same_tasks() -> None:
    """The two rooms do not import each other."""
    assert tasks.TASKS == TASKS


def test_what_is_compared_with() -> None:
    images = np.full((2, 2, 2, 3), 12, np.uint8)
    given = np.zeros((2, 12), np.float32)
    assert answers_of(graph(task="regression"), images, given) is given
    np.testing.assert_array_equal(answers_of(graph(task="reconstruction"), images, given), np.ones((2, 12)))


def test_answers_that_do_not_fit_are_told() -> None:
    labels, targets = np.array([0, 11]), np.zeros((2, 12), np.float32)
    assert answer_problem(graph(), 2, labels) is None
    assert answer_problem(graph(task="multi_label"), 2, targets) is None
    assert "one each" in str(answer_problem(graph(), 2, targets))
    assert "end at 11" in str(answer_problem(graph(), 2, np.array([0, 12])))
    assert "float32, 12 each" in str(answer_problem(graph(task="regression"), 2, targets[:, :5]))
