"""Training for other tasks than classification: loss and gradients in both engines, and learning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.graph import INPUT, BatchNorm, Flatten, Graph, Linear, Node
from fedmpq.model.integer_forward import logits
from fedmpq.model.integer_program import compile_program
from fedmpq.model.quantizers import place_quantizers
from fedmpq.model.randomness import Draws
from fedmpq.model.task import Answers, Task, answers_of
from fedmpq.training.engine import TrainingError, make_engine
from fedmpq.training.local_round import batches, check_data
from fedmpq.training.torch_losses import judged, loss_of
from tests.training.small_graphs import Net, random_state

pytestmark = pytest.mark.usefixtures("one_thread")

TASKS: tuple[Task, ...] = ("multi_label", "regression", "reconstruction")
ENGINES = ("native", "torch")
DRAWS = Draws(1, 2, 3)


def network(task: Task) -> Graph:
    net = Net(2, 3, 2)
    hidden = net.relu(net.add(Linear(12, 8, True), net.add(Flatten(), INPUT)))
    return replace(net.graph(hidden, outputs=12), task=task)


def batch(task: Task, count: int = 16, seed: int = 0) -> tuple[NDArray[np.uint8], Answers]:
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 3, 2, 2)).astype(np.uint8)
    values = random.normal(size=(count, 12)).astype(np.float32)
    return images, (values > 0).astype(np.float32) if task == "multi_label" else values


def slow_loss(
    task: Task, outputs: NDArray[np.float64], targets: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """Loss and gradient, one output at a time."""
    total, gradient = 0.0, np.zeros(outputs.shape)
    for place in np.ndindex(*outputs.shape):
        y, t = float(outputs[place]), float(targets[place])
        if task == "multi_label":
            share = 1 / (1 + np.exp(-y))
            total -= np.log(share if t == 1 else 1 - share)
            gradient[place] = share - t
        else:
            total += (y - t) ** 2
            gradient[place] = 2 * (y - t)
    return total / outputs.size, gradient / outputs.size


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ENGINES)
def test_a_step_has_the_loss_and_gradient_of_the_formula(name: str, task: Task) -> None:
    """The bias of the last layer moves by the sum of the gradients of its outputs."""
    graph = network(task)
    layers, side = random_state(graph, bits=(8,))
    images, given = batch(task)
    plan = TrainingPlan(
        update="carried", learning_rate=0.5, momentum=0.0, momentum_bits=0, weight_decay=0.0, lasso=0.0
    )
    engine = make_engine(name, threads=1)
    engine.load(graph, layers, side, plan, DRAWS)
    result = engine.train_epoch([(images, given)])
    outputs = logits(compile_program(graph, layers, side), images).astype(np.float64)
    targets = answers_of(graph, images, given).astype(np.float64)
    loss, gradient = slow_loss(task, outputs, targets)
    # The integer forward has its biases as multiples of the accumulators' scales.
    assert result.loss == pytest.approx(loss, rel=1e-3)
    right = np.mean((outputs > 0) == (targets == 1)) if task == "multi_label" else 0.0
    assert result.accuracy == pytest.approx(right)
    bias = f"{graph.output}.bias"
    moved = (side[bias] - engine.side()[bias]) / 0.5
    np.testing.assert_allclose(moved, gradient.sum(axis=0), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", ENGINES)
def test_a_reconstruction_may_end_with_a_convolution(name: str) -> None:
    """Its outputs are codes then, in the order in which torch flattens an image of several channels."""
    net = Net(2, 4, 6)
    image = net.conv(net.conv(INPUT, 5, norm=False, bias=True), 2, norm=False, bias=True, relu=None)
    nodes = (*net._nodes, Node("flat", Flatten(), (image,)))
    graph = place_quantizers(Graph("small", net._input, nodes, "flat", "reconstruction"), 8)
    layers, side = random_state(graph, bits=(8,))
    images = np.random.default_rng(4).integers(0, 256, (6, 4, 6, 2)).astype(np.uint8)
    engine = make_engine(name, threads=1)
    engine.load(graph, layers, side, TrainingPlan(), DRAWS)
    result = engine.train_epoch([(images, np.zeros(6, np.int64))])
    outputs = logits(compile_program(graph, layers, side), images).astype(np.float64)
    expected = np.zeros(outputs.shape)
    for place in np.ndindex(6, 2, 4, 6):
        sample, channel, row, column = place
        code = float(images[sample, row, column, channel])
        expected[sample, (channel * 4 + row) * 6 + column] = 0.015625 * (code - 110)
    assert result.loss == pytest.approx(np.square(outputs - expected).mean(), rel=1e-3)


@pytest.mark.parametrize("task", TASKS)
def test_torchs_gradients_equal_autograd(task: Task) -> None:
    _, targets = batch(task)
    outputs = torch.randn(16, 12, dtype=torch.float64, requires_grad=True)
    loss_of(task, outputs, torch.from_numpy(targets).double()).backward()
    assert outputs.grad is not None
    loss, _, gradient = judged(task, outputs.detach(), torch.from_numpy(targets).double())
    assert loss == pytest.approx(float(loss_of(task, outputs.detach(), torch.from_numpy(targets).double())))
    torch.testing.assert_close(gradient, outputs.grad)


def test_a_classification_has_torchs_own_loss() -> None:
    outputs, labels = torch.randn(7, 4), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    assert torch.equal(loss_of("classification", outputs, labels), functional.cross_entropy(outputs, labels))


def learnable(task: Task) -> Dataset:
    """Two hidden numbers make the image, and the targets follow from them."""
    random = np.random.default_rng(5)
    hidden, mixing = random.uniform(-1, 1, (192, 2)), random.normal(size=(2, 12))
    images = np.clip(128 + 60 * (hidden @ mixing), 0, 255).astype(np.uint8).reshape(-1, 3, 2, 2)
    values = (hidden @ random.normal(size=(2, 12))).astype(np.float32)
    targets = {"multi_label": (values > 0).astype(np.float32), "regression": values}.get(task)
    names = tuple(map(str, range(12)))
    return Dataset(images, np.zeros(192, np.int64), names, targets=targets)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_learns_a_task(name: str, task: Task) -> None:
    net = Net(2, 3, 2)
    hidden = net.relu(
        net.add(BatchNorm(16, 1e-5, 0.1), net.add(Linear(12, 16, False), net.add(Flatten(), INPUT)))
    )
    graph, data = replace(net.graph(hidden, outputs=12), task=task), learnable(task)
    check_data(graph, data, 0)
    plan = TrainingPlan(update="carried", batch_size=16, learning_rate=0.3, code_learning_rate=0.3, lasso=0.0)
    engine = make_engine(name, threads=1)
    engine.load(graph, *random_state(graph, bits=(8,)), plan, DRAWS)
    losses = [
        engine.train_epoch(batches(data, plan, DRAWS, epoch, graph.input.zero_point)).loss
        for epoch in range(12)
    ]
    assert losses[-1] < 0.4 * losses[0], losses


@pytest.mark.parametrize("name", ENGINES)
def test_two_engines_of_one_seed_agree(name: str) -> None:
    graph, data = network("regression"), learnable("regression")
    plan = TrainingPlan(update="carried", batch_size=16, lasso=0.0)
    trained: list[Any] = []
    for _ in range(2):
        engine = make_engine(name, threads=1)
        engine.load(graph, *random_state(graph, bits=(4,)), plan, DRAWS)
        engine.train_epoch(batches(data, plan, DRAWS, 0, graph.input.zero_point))
        trained.append({layer: found.codes for layer, found in engine.layers().items()})
    for layer, codes in trained[0].items():
        np.testing.assert_array_equal(codes, trained[1][layer])


def test_data_without_targets_are_refused() -> None:
    data = learnable("reconstruction")
    with pytest.raises(TrainingError, match="no targets a sample, the model 12 outputs for regression"):
        check_data(network("regression"), data, 3)
    check_data(network("reconstruction"), data, 3)
    engine = make_engine("native", threads=1)
    graph = network("regression")
    engine.load(graph, *random_state(graph), TrainingPlan(), DRAWS)
    with pytest.raises(TrainingError, match="float32, 12 each"):
        engine.train_epoch([(data.images[:4], data.labels[:4])])
