"""The hand-written backward passes against autograd on a straight-through network, and exact integer sums.

The reference is float64 and knows no codes: it rounds real values with `y + (rounded - y).detach()` and clips
by `where`, from which autograd derives the gradients of inputs and clips.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedmpq.model.graph import (
    Graph,
    Linear,
    Relu,
)
from fedmpq.model.quantized import Side
from tests.training.straight_through import (
    HEAD,
    IDLE,
    NETWORKS,
    Adjust,
    assert_close,
    build,
    chain,
    conv,
    network_gradients,
    norm,
    settled,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def check_against_autograd(
    graph: Graph,
    batch: int,
    margin: float,
    adjust: Adjust = lambda _: None,
    idle: frozenset[str] = frozenset(),
) -> None:
    case = settled(graph, batch, margin, adjust, idle)
    logits, gradients, after = network_gradients(
        graph, case.layers, case.side, case.images, case.pull.float()
    )
    assert_close(logits, case.logits, "logits")
    assert gradients.keys() == case.gradients.keys()
    for name, expected in case.gradients.items():
        assert_close(gradients[name], expected, name)
    for name, tensor in case.side.items():
        if "running" in name:
            assert_close(after[name], case.side_after[name], name)
        else:
            assert np.array_equal(after[name].numpy(), tensor), name


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_equal_autograd(name: str) -> None:
    idle = frozenset({IDLE[name]} if name in IDLE else ())
    check_against_autograd(build(NETWORKS[name]), batch=3, margin=1e-4, idle=idle)


def test_gradients_of_digits_cnn_equal_autograd(digits: Any) -> None:
    check_against_autograd(digits.graph, batch=2, margin=2e-5)


@pytest.mark.parametrize("clip", [5.0, 7.0])
def test_relu6_bounds_the_clip(clip: float) -> None:
    """Below 6 the clip cuts and learns; above, ReLU6 cuts and the clip has no gradient."""
    name = "op2.quantized.clip"

    def stretch(side: Side) -> None:
        side[name] = np.asarray(clip, dtype=np.float32)
        side["op1.weight"] = np.full_like(side["op1.weight"], 6.0)

    links = chain(conv(4, 5), norm(5), Relu(6.0), *HEAD, Linear(5, 3, True))
    idle = frozenset() if clip < 6 else frozenset({name})
    check_against_autograd(build(links), 3, 1e-4, stretch, idle)
