"""The last layer in integers: its bias as products of weights, its logits to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.export.executorch.last_layer import STEPS, with_bias
from fedmpq.export.executorch.lowering import lower_to_executorch
from fedmpq.export.executorch.runtime import ExecuTorchRunner
from fedmpq.export.executorch.verification import LOGIT_TOLERANCE, tolerance
from fedmpq.export.verify import random_images
from fedmpq.model.activations import CodeFormat
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.integer_forward import logits
from tests.export.models import deployed

UNSIGNED = CodeFormat(np.float32(1), 0, 255)
NO_WEIGHT = np.zeros((3, 0), np.int8)


@given(biases=st.lists(st.integers(-2_000_000, 2_000_000), min_size=3, max_size=3))
def test_the_columns_of_a_bias_sum_to_it(biases: list[int]) -> None:
    columns = with_bias(NO_WEIGHT, np.array(biases, np.int32), UNSIGNED)
    assert columns is not None
    assert np.abs(columns.astype(int)).max() <= 127
    assert columns.shape[1] >= 2  # without a feature of 255 rows would be quantized by what they hold
    features = np.array([1] + [STEPS] * (columns.shape[1] - 1))
    assert (columns.astype(int) @ features).tolist() == biases


@pytest.mark.parametrize(("bias", "source"), [(2**24, UNSIGNED), (5, CodeFormat(np.float32(1), -127, 127))])
def test_what_does_not_fit_stays_in_float32(bias: int, source: CodeFormat) -> None:
    assert with_bias(NO_WEIGHT, np.full(3, bias, np.int32), source) is None


def with_last_bias(model: DeployedModel, bias: NDArray[np.float32]) -> DeployedModel:
    return replace(model, side={**model.side, "fc.bias": bias})


@pytest.mark.parametrize("size", [0.0, 3.0, 60.0])
def test_logits_are_equal_to_the_bit_whatever_the_bias(size: float) -> None:
    """A black image has the same code everywhere: its row would have another step without the features."""
    model = deployed("digits_cnn", (4, 8))
    classes = len(model.class_names)
    model = with_last_bias(model, np.linspace(-size, size, classes, dtype=np.float32))
    assert tolerance(model) == 0
    images = random_images(model.graph, 9)
    got = ExecuTorchRunner(lower_to_executorch(model.program, model.layers)).logits(images)
    np.testing.assert_array_equal(got, logits(model.program, images), strict=True)


def test_a_huge_bias_is_added_in_float32() -> None:
    model = with_last_bias(deployed("digits_cnn", (4, 8)), np.full(7, 1e5, np.float32))
    assert tolerance(model) == LOGIT_TOLERANCE
    images = random_images(model.graph, 4)
    expected = logits(model.program, images)
    got = ExecuTorchRunner(lower_to_executorch(model.program, model.layers)).logits(images)
    np.testing.assert_allclose(got, expected, rtol=0, atol=LOGIT_TOLERANCE * np.abs(expected).max())
