"""Calls bound once: they see numbers and places as they are when called, and refuse what does not fit."""

from __future__ import annotations

from ctypes import c_float, c_uint32
from typing import Any

import numpy as np
import pytest

from fedmpq.kernels import bound
from fedmpq.kernels.memory import Buffer
from fedmpq.kernels.tensors import CodeUpdate, Conv, Counter, MomentumBuffer, StoredCodes
from tests.kernels import training_calls as training


def test_numbers_and_places_are_read_when_called() -> None:
    random = np.random.default_rng(0)
    error, inverse, step = Buffer(60, np.uint16), c_float(), c_uint32()
    out = Buffer(60, np.int8)
    call = bound.quantize_error(error, 2, 30, inverse, Counter(1, 2, 3, 4, 0), 6, 1, out, step)
    assert call.buffers == (error, out)
    for number in range(3):
        errors = (random.normal(size=60).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        error.put(errors)
        out.put(np.zeros(60, np.int8))
        inverse.value, step.value = 10.0 + number, 7 + number
        call()
        expected = np.zeros(60, np.int8)
        training.quantize_error(errors, 2, 30, 10.0 + number, Counter(1, 2, 3, 4, 7 + number), 6, 1, expected)
        np.testing.assert_array_equal(out.array, expected)
        assert expected.any()


def test_both_sides_of_an_addition_may_move() -> None:
    random = np.random.default_rng(0)
    left, right = Buffer(10, np.uint8), Buffer(10, np.uint8)
    out, states = np.zeros(10, np.uint8), np.zeros(3, np.uint8)
    scaled = StoredCodes(left, False, 0), 2.0, StoredCodes(right, False, 3), 1.0
    addition = bound.add(*scaled, 1, 10, c_float(1.0), 0, 255, False, 1, out, states)
    for _ in range(2):
        values = random.integers(3, 50, (2, 10)).astype(np.uint8)
        left.put(values[0].copy())
        right.put(values[1].copy())
        addition()
        assert out.tolist() == (2 * values[0].astype(int) + values[1] - 3).tolist()


@pytest.mark.parametrize(
    "array",
    [np.zeros(59, np.uint16), np.zeros(60, np.int16), np.zeros((60, 2), np.uint16)[:, 0]],
    ids=["short", "type", "strided"],
)
def test_an_array_that_does_not_fit_is_refused(array: Any) -> None:
    message = r"a buffer of \d+ u?int16 where 60 contiguous uint16 are due"
    with pytest.raises(ValueError, match=message):
        Buffer(60, np.uint16).put(array)
    with pytest.raises(ValueError, match=message):
        bound.add_errors(array, 60, np.zeros(60, np.uint16))


def test_a_buffer_that_does_not_fit_is_refused_before_it_has_a_place() -> None:
    for buffer in (Buffer(59, np.uint16), Buffer(60, np.int16)):
        with pytest.raises(ValueError, match="where 60 contiguous uint16 are due"):
            bound.add_errors(buffer, 60, np.zeros(60, np.uint16))


def test_a_dropped_array_is_let_go() -> None:
    buffer = Buffer(3, np.uint8)
    buffer.put(np.zeros(3, np.uint8))
    buffer.drop()
    assert buffer.pointer.value is None
    assert not hasattr(buffer, "array")


def test_a_table_of_the_wrong_size_is_refused() -> None:
    update = CodeUpdate.of(
        4,
        bits=3,
        step=np.ones(1, np.float32),
        rate=np.ones(1, np.float32),
        weight_decay=0.0,
        momentum=0.0,
        buffer=MomentumBuffer.zeros(4, 0),
        counter=Counter(0, 0, 0, 0, 0),
    )
    with pytest.raises(ValueError, match="table has 3 entries; 3 bits need 4"):
        update.pull_by(np.zeros(3, np.float32))


@pytest.mark.parametrize("kernel", [(1, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 3)])
def test_an_output_has_as_many_pixels_as_there_are_places_for_the_window(
    kernel: Any, stride: Any, padding: Any, dilation: Any
) -> None:
    conv = Conv.over(2, (4, 17, 23), kernel, stride, padding, dilation, 6, 2)
    places = [
        [first for first in range(0, size + 2 * p, s) if first + d * (k - 1) < size + 2 * p]
        for size, k, s, p, d in zip((17, 23), kernel, stride, padding, dilation, strict=True)
    ]
    assert [conv.out_height, conv.out_width] == [len(axis) for axis in places]
    assert (conv.images, conv.channels, conv.height, conv.width) == (2, 4, 17, 23)
    assert (conv.out_channels, conv.groups, conv.weights) == (6, 2, 6 * 2 * kernel[0] * kernel[1])


def test_a_pool_has_as_many_channels_as_its_input() -> None:
    assert Conv.over(1, (5, 4, 4), (2, 2), (2, 2)).out_channels == 5
