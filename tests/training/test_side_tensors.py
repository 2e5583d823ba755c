"""Side tensors in one vector against the same rules, tensor by tensor."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.activations import MIN_CLIP, CodeFormat
from fedmpq.model.quantized import Side
from fedmpq.training.native_plan import units_of
from fedmpq.training.side_tensors import NotFinite, SideTensors, all_finite
from tests.training.small_graphs import GRAPHS, random_state

PLAN = TrainingPlan(learning_rate=0.3, momentum=0.75, weight_decay=0.01)


def made(name: str, plan: TrainingPlan = PLAN, **changes: float) -> tuple[SideTensors, Side]:
    graph = GRAPHS[name]()
    _, side = random_state(graph)
    for tensor, value in changes.items():
        side[tensor] = np.full_like(side[tensor], value)
    return SideTensors(side, units_of(graph), plan), side


@pytest.mark.parametrize("name", GRAPHS)
def test_every_tensor_has_its_place(name: str) -> None:
    tensors, side = made(name)
    assert {*tensors.places, *tensors.running_places} == side.keys()
    got = tensors.tensors()
    assert list(got) == list(side)
    for key, tensor in side.items():
        np.testing.assert_array_equal(got[key], tensor)
        assert got[key].shape == tensor.shape
        assert not np.shares_memory(got[key], tensors.values)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_an_update_is_sgd_tensor_by_tensor(name: str, momentum: float) -> None:
    tensors, expected = made(name, replace(PLAN, momentum=momentum))
    random = np.random.default_rng(0)
    maxima = {f"{each.name}.clip": each.maximum for each in tensors.quantizers}
    held: Side = {}
    for _ in range(3):
        tensors.gradients[:] = random.normal(size=tensors.gradients.size)
        for key, place in tensors.places.items():
            value, gradient = expected[key], tensors.gradients[place].reshape(expected[key].shape)
            if 0 < maxima.get(key, 0.0) <= value.max():
                gradient = np.zeros_like(gradient)
            direction = gradient + np.float32(PLAN.weight_decay) * value
            held[key] = held[key] * np.float32(momentum) + direction if key in held else direction
            moved = value - np.float32(PLAN.learning_rate) * held[key]
            expected[key] = np.maximum(moved, MIN_CLIP) if key in maxima else moved
        tensors.update()
        for key, tensor in tensors.tensors().items():
            np.testing.assert_array_equal(tensor, expected[key], err_msg=key)


@pytest.mark.parametrize("name", GRAPHS)
def test_statistics_are_tracked_tensor_by_tensor(name: str) -> None:
    tensors, side = made(name)
    new = np.random.default_rng(0).normal(size=tensors.statistics)
    tensors.track(new)
    got = tensors.tensors()
    for key, place in tensors.running_places.items():
        expected = side[key] + np.float32(0.125) * (new[place].astype(np.float32) - side[key])
        np.testing.assert_array_equal(got[key], expected)


@pytest.mark.parametrize("name", GRAPHS)
def test_scales_are_those_of_the_quantizers(name: str) -> None:
    tensors, side = made(name)
    tensors.find_scales()
    for quantizer in tensors.quantizers:
        clip = np.float32(side[f"{quantizer.name}.clip"])
        form = CodeFormat.quantized(clip, quantizer.maximum, quantizer.op.bits, quantizer.op.signed)
        assert tensors.scale_of(quantizer).value == float(form.scale)


def test_what_is_not_finite_is_named() -> None:
    tensors, _ = made("residuals")
    tensors.gradients[tensors.places["batchnorm1.bias"].start + 2] = math.nan
    with pytest.raises(NotFinite, match=r"the gradient of 'batchnorm1\.bias' is not finite"):
        tensors.update()
    tensors, _ = made("residuals", replace(PLAN, learning_rate=3e38))
    tensors.gradients[tensors.places["batchnorm1.weight"].start] = 3e3
    with (
        np.errstate(over="ignore"),
        pytest.raises(NotFinite, match=r"the side tensor 'batchnorm1\.weight' is not finite"),
    ):
        tensors.update()
    tensors, _ = made("residuals")
    statistics = np.zeros(tensors.statistics)
    statistics[tensors.running_places["batchnorm1.running_var"].start] = math.inf
    with pytest.raises(NotFinite, match=r"the side tensor 'batchnorm1\.running_var' is not finite"):
        tensors.track(statistics)


def test_a_sum_that_overflows_is_of_finite_numbers() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        assert all_finite(np.full(4, 3e38, np.float32))
        assert not all_finite(np.array([1.0, math.nan]))
        assert not all_finite(np.array([math.inf, -math.inf]))
