"""Models and data for the tests of local training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from fedmpq.data.dataset import Dataset
from fedmpq.model.graph import Graph
from fedmpq.model.grid import StepRule
from fedmpq.model.quantized import Layers, QuantizedLayer, Side, Weights
from tests.small_network import make_data, make_model

__all__ = ["make_data", "make_model"]


class Digits(NamedTuple):
    graph: Graph
    weights: Weights
    side: Side
    train: Dataset
    test: Dataset

    def layers(self, bits: int, rule: StepRule) -> Layers:
        return {
            name: QuantizedLayer.from_weights(weight, bits, rule, False)
            for name, weight in self.weights.items()
        }


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch threads change the order of float sums, and idle ones spin beside other tests."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def digits() -> Digits:
    """digits_cnn as seed 0 initialises it, and scikit-learn's digits."""
    import torch

    from fedmpq.data.named import load_named
    from fedmpq.model import zoo
    from fedmpq.model.module_state import initial_state
    from fedmpq.model.trace import trace

    train, test = load_named("digits")
    scale, zero_point = train.normalisation()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = zoo.build("digits_cnn", classes=10, channels=1)
    graph = trace(
        module,
        torch.zeros(1, 1, 8, 8),
        name="digits_cnn",
        activation_bits=4,
        input_scale=scale,
        input_zero_point=zero_point,
    )
    return Digits(graph, *initial_state(module, graph), train, test)
