"""The torch engine on numbers that are none: refused, with the step and the layer named."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.randomness import Draws
from fedmpq.training import torch_ops
from fedmpq.training.engine import TrainingError
from fedmpq.training.torch_engine import _TrainedLayer
from tests.training.torch_engines import CARRIED, PAPER, Made, batch_of, loaded

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_loss_that_is_no_number_names_the_step(make_model: Made, make_data: Made) -> None:
    model, data = make_model(), make_data(16)
    engine = loaded(model, replace(PAPER, learning_rate=1e38))
    with pytest.raises(TrainingError, match=r"in training step 1; lower the learning rate \(now 1e\+38\)"):
        engine.train_epoch([batch_of(data, 0, 8), batch_of(data, 8, 16)])


def test_an_infinite_loss_names_the_step(make_model: Made, make_data: Made) -> None:
    model, data = make_model(), make_data(16)
    model.side["classes.bias"][:] = [3e38, -3e38, -3e38]
    engine = loaded(model, PAPER)
    with pytest.raises(TrainingError, match=r"the loss is (inf|nan) in training step 0; lower"):
        engine.train_epoch([batch_of(data, 0, 16)])


@pytest.mark.parametrize("plan", [PAPER, CARRIED])
@pytest.mark.parametrize("momentum_bits", [0, 8, 32])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_no_number_names_the_layer_and_leaves_its_codes(
    make_model: Made,
    make_data: Made,
    monkeypatch: pytest.MonkeyPatch,
    plan: TrainingPlan,
    momentum_bits: int,
    bad: float,
) -> None:
    model, data = make_model(), make_data(16)
    backward = torch_ops.backward_product

    def spoiled(packed: Any, scale: float, weight: Any, op: Any, gradient: Any, first: bool) -> Any:
        source, weights = backward(packed, scale, weight, op, gradient, first)
        if op is model.graph.by_name["wide"].op:
            weights[0, 0, 0, 0] = bad
        return source, weights

    monkeypatch.setattr(torch_ops, "backward_product", spoiled)
    engine = loaded(model, replace(plan, momentum_bits=momentum_bits))
    with pytest.raises(TrainingError, match=r"gradient of layer 'wide' is not finite in training step 0"):
        engine.train_epoch([batch_of(data, 0, 16)])
    for name in ("stem", "depthwise", "wide"):
        assert np.array_equal(engine.layers()[name].codes, model.layers[name].codes)


@pytest.mark.parametrize("momentum_bits", [8, 32])
def test_momentum_that_overflows_is_refused(momentum_bits: int) -> None:
    layer = QuantizedLayer(np.full((1, 3), 8, np.uint8), 4, np.asarray(0.1, dtype=np.float32))
    held = _TrainedLayer(0, "layer", layer, replace(PAPER, momentum_bits=momentum_bits), Draws(0, 0, 0))
    held.apply(np.full(3, 3e38, np.float32), 0)
    with pytest.raises(TrainingError, match="layer 'layer' is not finite in training step 1"):
        held.apply(np.full(3, 3e38, np.float32), 1)


def test_huge_finite_gradients_saturate() -> None:
    """No overflow in the update itself: the codes go to the end of their range."""
    for plan in (PAPER, CARRIED):
        layer = QuantizedLayer(np.full((2, 1), 8, np.uint8), 4, np.asarray(1e-6, dtype=np.float32))
        held = _TrainedLayer(0, "layer", layer, replace(plan, code_learning_rate=10.0), Draws(0, 0, 0))
        held.apply(np.array([3e38, -3e38], np.float32), 0)
        assert held.codes.tolist() == [0, 15]


def test_side_gradients_that_are_no_numbers_are_refused(make_model: Made) -> None:
    engine = loaded(make_model(), PAPER)
    with pytest.raises(TrainingError, match=r"'classes\.bias' is not finite in training step 0"):
        engine._update_side("classes.bias", torch.tensor([0.0, math.nan, 0.0]))
