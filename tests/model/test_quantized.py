"""Quantized layers, in memory and packed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.model import grid
from fedmpq.model.quantized import QuantizedLayer, average_bits, dequantize_all

SHAPES = st.sampled_from([(1, 1), (1, 9), (7, 3), (5, 1, 3, 3), (2, 3, 1, 1), (3, 2, 5, 3)])


@st.composite
def layers(draw: st.DrawFn) -> QuantizedLayer:
    shape = draw(SHAPES)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = random.normal(0, 0.1, shape).astype(np.float32)
    rule: grid.StepRule = draw(st.sampled_from(["max", "least_error"]))
    return QuantizedLayer.from_weights(weights, draw(st.integers(1, 8)), rule, draw(st.booleans()))


@given(layers())
def test_packing_loses_nothing(layer: QuantizedLayer) -> None:
    packed = layer.pack()
    assert packed.bits == layer.bits
    plane = -(-layer.codes.size // 8)
    assert packed.nbytes == layer.bits * plane + 4 * layer.step.size
    again = packed.unpack(layer.codes.shape)
    assert again.bits == layer.bits
    np.testing.assert_array_equal(again.codes, layer.codes)
    np.testing.assert_array_equal(again.step, layer.step)
    np.testing.assert_array_equal(again.weights(), layer.weights())


@given(layers())
def test_integer_weights_times_their_scale_are_the_weights(layer: QuantizedLayer) -> None:
    integers, scale = layer.integer_weights(), layer.integer_scale()
    assert integers.shape == layer.codes.shape
    assert scale.shape == layer.step.shape
    columns = scale if scale.ndim == 0 else scale.reshape(-1, *[1] * (integers.ndim - 1))
    np.testing.assert_array_equal(integers.astype(np.float32) * columns, layer.weights())


@pytest.mark.parametrize("rule", ["max", "least_error"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_from_weights_takes_its_rules_step(rule: grid.StepRule, per_channel: bool) -> None:
    weights = np.random.default_rng(0).laplace(size=(4, 3, 3, 3)).astype(np.float32)
    layer = QuantizedLayer.from_weights(weights, 3, rule, per_channel)
    step = grid.STEP_RULES[rule](weights, 3, per_channel)
    assert layer.bits == 3
    np.testing.assert_array_equal(layer.step, step)
    np.testing.assert_array_equal(layer.codes, grid.quantize(weights, step, 3))


def test_dequantize_all_is_every_layer() -> None:
    weights = {"a": np.eye(3, dtype=np.float32), "b": np.ones((2, 5), np.float32)}
    made = {name: QuantizedLayer.from_weights(w, 8, "max", False) for name, w in weights.items()}
    real = dequantize_all(made)
    assert list(real) == ["a", "b"]
    for name, layer in made.items():
        np.testing.assert_array_equal(real[name], layer.weights())


def test_average_bits_weighs_by_size() -> None:
    assert average_bits((2, 8), (30, 10)) == 3.5
    assert average_bits((5,), (7,)) == 5
    with pytest.raises(ValueError, match="zip"):
        average_bits((2, 8), (30,))
