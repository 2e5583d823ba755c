"""Sums of products of codes and weights: NumPy's and torch's against whole numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedmpq.model.graph import (
    Conv2d,
    Linear,
)
from fedmpq.model.integer_forward import numpy_products
from tests.model.integer_reference import slow_conv


def check_products(
    op: Conv2d | Linear, codes: NDArray[np.int32], weight: NDArray[np.int8], bound: int
) -> None:
    from tests.training.torch_products import integer_products

    wide = weight.astype(np.int64)
    if isinstance(op, Linear):
        expected = codes.astype(np.int64) @ wide.T
    else:
        rows = codes.astype(np.int64).transpose(0, 3, 1, 2)
        expected = np.stack([slow_conv(image, wide, op) for image in rows]).transpose(0, 2, 3, 1)
    for products in (numpy_products, integer_products):
        got = products(codes, weight, op, bound)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected)


@settings(max_examples=60)
@given(st.data())
def test_products_are_exact(data: st.DataObject) -> None:
    size, few = st.integers(1, 4), st.integers(0, 2)
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    inputs, outputs = groups * data.draw(size), groups * data.draw(size)
    kernel, stride = (data.draw(size), data.draw(size)), (data.draw(size), data.draw(size))
    op = Conv2d(inputs, outputs, kernel, stride, (data.draw(few), data.draw(few)), (1, 2), groups, False)
    bound = data.draw(st.sampled_from([1, 15, 127, 255]))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    height, width = kernel[0] + data.draw(few), 2 * kernel[1] + data.draw(few)
    codes = random.integers(-bound, bound + 1, (2, height, width, inputs), dtype=np.int32)
    check_products(op, codes, random.integers(-127, 128, op.weight_shape, dtype=np.int8), bound)


LONG: dict[str, Conv2d | Linear] = {
    "linear": Linear(2001, 3, False),
    "conv": Conv2d(75, 4, (3, 3), (2, 1), (1, 1), (1, 1), 1, False),
    "groups": Conv2d(122, 4, (3, 3), (2, 1), (1, 1), (1, 1), 2, False),
    "one channel": Conv2d(2, 2, (24, 23), (1, 1), (1, 1), (1, 1), 2, False),
}


@pytest.mark.parametrize("name", LONG)
def test_products_beyond_the_reach_of_float32_are_exact(name: str) -> None:
    op = LONG[name]
    random = np.random.default_rng(0)
    size = (24, 24) if name == "one channel" else (4, 3)
    shape = (2, op.in_features) if isinstance(op, Linear) else (2, *size, op.in_channels)
    codes = random.integers(253, 256, shape, dtype=np.int32)
    weight = random.integers(125, 128, op.weight_shape, dtype=np.int8)
    sums = numpy_products(codes, weight, op, 255)
    assert sums.max() > 2**24
    # Some of them float32 cannot even hold.
    assert (sums.astype(np.float32).astype(np.int64) != sums).any()
    check_products(op, codes, weight, 255)


def test_products_of_no_images() -> None:
    for op in (Linear(5, 3, False), LONG["conv"], LONG["groups"]):
        shape = (0, 5) if isinstance(op, Linear) else (0, 4, 3, op.in_channels)
        sums = numpy_products(np.zeros(shape, np.int32), np.ones(op.weight_shape, np.int8), op, 15)
        assert sums.shape[0] == 0
        assert sums.shape[-1] == op.weight_shape[0]
