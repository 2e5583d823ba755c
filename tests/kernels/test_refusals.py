"""Every kernel checks what it relies on where it is entered: what cannot be is an error, never a crash."""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import c_uint32
from typing import Any

import numpy as np
import pytest

from fedmpq.kernels import bound, bound_shapes
from fedmpq.kernels.call import Call, KernelError
from fedmpq.kernels.library import library
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import (
    CodeUpdate,
    Conv,
    Counter,
    MomentumBuffer,
    Normalize,
    Pool,
    Rescale,
    StoredCodes,
)

MOST = 2**31 - 1
SIZES = ("height", "width", "channels", "out_height", "out_width", "out_channels", "kernel_h", "kernel_w")
STEPS = ("stride_h", "stride_w", "dilation_h", "dilation_w", "groups")


def floats(count: int) -> Any:
    return np.ones(count, np.float32)


def codes(count: int = 4096) -> StoredCodes:
    return StoredCodes(np.zeros(count, np.uint8), False, 3)


def rescale() -> Rescale:
    return Rescale(floats(64), floats(64), 0, 15)


def window(**more: Any) -> Conv:
    return Conv.over(2, (4, 6, 6), kernel=(3, 3), padding=(1, 1), **more)


def forward(conv: Conv, sums: Any = None) -> Call:
    weights, acc = np.ones(4096, np.int8), np.zeros(4096, np.int32)
    return bound.conv_forward(conv, codes(), weights, 2, acc, sums)


def backward_sums(conv: Conv, kept: Any = None) -> Call:
    weights, acc, error = np.ones(4096, np.int8), np.zeros(4096, np.int32), np.zeros(4096, np.uint16)
    normalize, sums = Normalize(floats(64), floats(64)), np.zeros(256)
    return bound.conv_backward_sums(conv, codes(), weights, kept, error, rescale(), normalize, 2, acc, sums)


def requantize_again(conv: Conv) -> Call:
    weights, out = np.ones(4096, np.int8), np.zeros(4096, np.uint8)
    return bound.conv_requantize(conv, codes(), weights, rescale(), False, 2, out)


def error_again(conv: Conv) -> Call:
    weights, error, out = np.ones(4096, np.int8), np.zeros(4096, np.uint16), np.zeros(4096, np.uint16)
    maps = rescale(), Normalize(floats(64), floats(64)), floats(64), floats(64), floats(64)
    return bound.conv_backward_error(conv, codes(), weights, error, *maps, 2, out, floats(64))


def backward_input(conv: Conv) -> Call:
    weights, errors = np.ones(4096, np.int8), np.ones(4096, np.int8)
    return bound.conv_backward_input(conv, errors, weights, 1.0, False, 2, np.zeros(4096, np.uint16))


def backward_weights(conv: Conv) -> Call:
    errors = np.ones(4096, np.int8)
    return bound.conv_backward_weights(conv, codes(), errors, floats(64), 2, floats(4096))


def pool_of_two() -> Pool:
    return Pool.over(2, (4, 6, 6), [(0, 3), (2, 6)], [(0, 6)])


def calls_of(pool: Pool) -> list[Call]:
    errors, out, shares = np.zeros(4096, np.uint16), np.zeros(4096, np.uint16), floats(64)
    return [
        bound_shapes.max_pool(pool, codes(), 2, np.zeros(4096, np.uint8)),
        bound_shapes.max_pool_backward(pool, codes(), errors, 2, out),
        bound_shapes.average_pool(pool, codes(), shares, 0, 255, 2, np.zeros(4096, np.uint8)),
        bound_shapes.average_pool_backward(pool, errors, shares, 2, out),
    ]


PRODUCTS = [forward, backward_sums, requantize_again, error_again, backward_input, backward_weights]


@pytest.mark.parametrize("make", PRODUCTS)
def test_a_window_that_cannot_be_is_refused(make: Callable[[Conv], Call]) -> None:
    """The call is bound to a window that can be, of which one number then changes."""
    conv = window()
    call = make(conv)
    call()
    for name in (*SIZES, *STEPS, "pad_h", "pad_w", "images"):
        least = 0 if name in ("images", "pad_h", "pad_w") else 1
        for value in (-MOST - 1, least - 1, 65537, MOST):
            before = getattr(conv, name)
            setattr(conv, name, value)
            if name == "images" and value == 65537:
                setattr(conv, name, 2**24 + 1)
            with pytest.raises(KernelError, match=rf"{name}=-?\d+.* refuses its arguments"):
                call()
            setattr(conv, name, before)
    call()


@pytest.mark.parametrize("make", PRODUCTS)
@pytest.mark.parametrize(
    ("name", "value"), [("out_height", 7), ("out_width", 5), ("pad_h", 2), ("height", 5)]
)
def test_windows_that_do_not_fit_their_output_are_refused(
    make: Callable[[Conv], Call], name: str, value: int
) -> None:
    conv = window()
    call = make(conv)
    setattr(conv, name, value)
    with pytest.raises(KernelError, match="outside what it takes"):
        call()


@pytest.mark.parametrize("make", PRODUCTS)
def test_groups_that_do_not_divide_the_channels_are_refused(make: Callable[[Conv], Call]) -> None:
    conv = window()
    call = make(conv)
    conv.groups = 3
    with pytest.raises(KernelError, match="groups=3"):
        call()


@pytest.mark.parametrize("make", PRODUCTS)
def test_an_empty_batch_is_nothing_to_do(make: Callable[[Conv], Call]) -> None:
    conv = window()
    call = make(conv)
    conv.images = 0
    call()


@pytest.mark.parametrize("name", ["images", "height", "width", "channels", "out_height", "out_width"])
@pytest.mark.parametrize("value", [-MOST - 1, -1, 2**24 + 1, MOST])
def test_a_pool_that_cannot_be_is_refused(name: str, value: int) -> None:
    pool = pool_of_two()
    for call in calls_of(pool):
        call()
        before = getattr(pool, name)
        setattr(pool, name, value)
        with pytest.raises(KernelError, match="outside what it takes"):
            call()
        setattr(pool, name, before)
        call()


@pytest.mark.parametrize("spans", [[(-1, 2)], [(0, 7)], [(3, 3)], [(5, 2)], [(0, 1), (6, 7)]])
def test_a_window_that_leaves_the_image_or_is_empty_is_refused(spans: list[tuple[int, int]]) -> None:
    for pool in (Pool.over(1, (4, 6, 6), spans, [(0, 6)]), Pool.over(1, (4, 6, 6), [(0, 6)], spans)):
        for call in calls_of(pool):
            with pytest.raises(KernelError, match="outside what it takes"):
                call()


@pytest.mark.parametrize(
    ("start", "channels", "low", "high"), [(-1, 8, 0, 255), (5, 8, 0, 255), (0, 3, 0, 255), (0, 8, -1, 255)]
)
def test_a_part_that_does_not_fit_is_refused(start: int, channels: int, low: int, high: int) -> None:
    extent = FedmpqExtent(2, 9, 4)
    join = bound_shapes.join(codes(), extent, 1.0, low, high, start, channels, 2, np.zeros(4096, np.uint8))
    with pytest.raises(KernelError, match="outside what it takes"):
        join()
    part = bound_shapes.part_errors(
        np.zeros(4096, np.uint16), extent, start, channels, 2, np.zeros(4096, np.uint16)
    )
    if (start, channels) != (0, 8):
        with pytest.raises(KernelError, match="outside what it takes"):
            part()


@pytest.mark.parametrize("place", [-2, 10, MOST])
def test_a_place_beyond_the_elements_is_refused(place: int) -> None:
    places = np.array([0, place, 9], np.int32)
    for call in (
        bound_shapes.rearrange(codes(), 2, 10, places, 2, np.zeros(64, np.uint8)),
        bound_shapes.rearrange_backward(np.zeros(64, np.uint16), 2, 10, places, 2, np.zeros(64, np.uint16)),
    ):
        with pytest.raises(KernelError, match="outside what it takes"):
            call()


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.5, math.nan])
def test_a_rate_that_drops_nothing_or_all_is_refused(rate: float) -> None:
    stream = Counter(1, 2, 3, 4, 0), 8, c_uint32(5), 2
    for call in (
        bound_shapes.drop(codes(), FedmpqExtent(2, 5, 2), False, rate, *stream, np.zeros(64, np.uint8)),
        bound_shapes.drop_errors(FedmpqExtent(2, 5, 2), False, rate, 2.0, *stream, np.zeros(64, np.uint16)),
    ):
        with pytest.raises(KernelError, match="outside what it takes"):
            call()


def test_the_sums_of_an_empty_batch_are_zero() -> None:
    conv, sums = window(), np.ones(8)
    call = forward(conv, sums)
    conv.images = 0
    call()
    assert not sums.any()


@pytest.mark.parametrize("threads", [-MOST, -1, 0, 1, 65, 1000, MOST])
def test_any_number_of_threads_gives_the_same_sums(threads: int) -> None:
    conv = Conv.over(90, (4, 6, 6), kernel=(3, 3), padding=(1, 1))
    random = np.random.default_rng(0)
    source = StoredCodes(random.integers(0, 256, 90 * 144).astype(np.uint8), False, 3)
    weights = random.integers(-127, 128, conv.weights).astype(np.int8)
    sums, expected = (np.zeros(90 * conv.outputs, np.int32) for _ in range(2))
    bound.conv_forward(conv, source, weights, threads, sums, None)()
    bound.conv_forward(conv, source, weights, 1, expected, None)()
    np.testing.assert_array_equal(sums, expected)
    gradients = [floats(conv.weights), floats(conv.weights)]
    errors = random.integers(-127, 128, 90 * conv.outputs).astype(np.int8)
    for number, gradient in zip((threads, 1), gradients, strict=True):
        bound.conv_backward_weights(conv, source, errors, floats(4), number, gradient)()
    np.testing.assert_array_equal(*gradients)


def test_sums_that_32_bits_might_not_hold_are_refused() -> None:
    """66312 products of 255 * 127 are more than 2^31 - 1; of 255 * 126 they are not."""
    terms = 36 * 1842
    conv = Conv.over(1, (1842, 6, 6), kernel=(6, 6), out_channels=1)
    source = StoredCodes(np.full(terms, 255, np.uint8), False, 0)
    weights, acc = np.full(terms, 127, np.int8), np.zeros(1, np.int32)
    call = bound.conv_forward(conv, source, weights, 1, acc, None)
    with pytest.raises(KernelError, match="might not fit 32 bits"):
        call()
    weights[:] = 126
    call()
    assert acc[0] == 255 * 126 * terms


def test_errors_of_too_many_outputs_are_refused() -> None:
    outputs = 65536
    conv = Conv.over(1, (1, 1, 3), kernel=(1, 3), padding=(0, 1), out_channels=outputs)
    errors, weights = np.full(3 * outputs, 127, np.int8), np.full(3 * outputs, 127, np.int8)
    out = np.zeros(3, np.uint16)
    with pytest.raises(KernelError, match="might not fit 32 bits"):
        bound.conv_backward_input(conv, errors, weights, 1.0, False, 1, out)()
    weights[:] = 63
    bound.conv_backward_input(conv, errors, weights, 2.0**-30, False, 1, out)()
    assert out.view(np.uint16)[1] > 0


def test_a_padded_image_beyond_32_bits_is_refused() -> None:
    conv = Conv.over(1, (1, 1, 1), kernel=(65536, 65536), padding=(32768, 32768))
    conv.kernel_h = conv.kernel_w = 1
    conv.stride_h = conv.stride_w = 32768
    conv.out_height = conv.out_width = 3
    for make in (forward, backward_weights):
        with pytest.raises(KernelError, match="outside what it takes"):
            make(conv)()


@pytest.mark.parametrize("zero", [-1, 256, MOST])
def test_a_zero_that_is_no_code_is_refused(zero: int) -> None:
    source = StoredCodes(np.zeros(4096, np.uint8), False, zero)
    for call in (
        bound.conv_forward(window(), source, np.ones(144, np.int8), 1, np.zeros(4096, np.int32), None),
        bound_shapes.max_pool(pool_of_two(), source, 1, np.zeros(4096, np.uint8)),
        bound.add(source, 1.0, codes(), 1.0, 1, 8, 1.0, 0, 15, False, 1, codes().data, codes().data),
    ):
        with pytest.raises(KernelError, match="outside what it takes"):
            call()


def test_kept_accumulators_of_a_layer_that_cannot_be_are_refused() -> None:
    conv = window()
    call = backward_sums(conv, (np.zeros(4096, np.int16), np.ones(1, np.int32)))
    call()
    conv.out_height = -1
    with pytest.raises(KernelError, match="out_height=-1"):
        call()


def passes(extent: FedmpqExtent) -> list[Call]:
    acc, error, out = np.zeros(64, np.int32), np.zeros(64, np.uint16), np.zeros(64, np.uint16)
    normalize = Normalize(floats(64), floats(64))
    vectors = floats(64), floats(64), floats(64)
    return [
        bound.requantize(acc, extent, rescale(), False, 1, np.zeros(64, np.uint8)),
        bound.backward_error(acc, error, extent, rescale(), normalize, *vectors, 1, out, floats(64)),
    ]


@pytest.mark.parametrize("name", ["images", "pixels", "channels"])
@pytest.mark.parametrize("value", [-1, -MOST, MOST])
def test_an_extent_that_cannot_be_is_refused(name: str, value: int) -> None:
    extent = FedmpqExtent(2, 4, 8)
    for call in passes(extent):
        call()
        before = getattr(extent, name)
        setattr(extent, name, value)
        with pytest.raises(KernelError, match=f"{name}={value}"):
            call()
        setattr(extent, name, before)


@pytest.mark.parametrize(("low", "high"), [(0, 16), (3, 2), (-300, 0), (float("nan"), 15), (0, float("inf"))])
def test_codes_that_do_not_fit_their_bits_are_refused(low: Any, high: Any) -> None:
    extent, into = FedmpqExtent(1, 4, 8), np.zeros(64, np.uint8)
    scales = Rescale(floats(8), floats(8), low, high)
    for call in (
        bound.requantize(np.zeros(32, np.int32), extent, scales, True, 1, into),
        bound.add(codes(), 1.0, codes(), 1.0, 1, 8, 1.0, low, high, True, 1, into, into),
    ):
        with pytest.raises(KernelError, match="outside what it takes"):
            call()


@pytest.mark.parametrize("label", [-1, 5, 2**40])
def test_a_label_that_is_no_class_is_refused(label: int) -> None:
    labels = np.array([0, label, 4])
    logits, loss = np.zeros(15, np.int32), np.zeros(1)
    call = bound.softmax_loss(logits, 3, 5, floats(5), floats(5), floats(5), labels, floats(15), loss)
    with pytest.raises(KernelError, match="label is outside"):
        call()
    labels[1] = 4
    assert call() >= 0


UPDATES = [
    ("bits", 0),
    ("bits", 9),
    ("bits", MOST),
    ("count", -1),
    ("row", 0),
    ("row", 3),
    ("momentum_bits", 7),
]


@pytest.mark.parametrize(("name", "value"), UPDATES)
def test_a_layer_that_cannot_be_is_not_updated(name: str, value: int) -> None:
    given = {"bits": 4, "weight_decay": 0.0, "momentum": 0.9, "buffer": MomentumBuffer.zeros(8, 32)}
    update = CodeUpdate.of(8, step=floats(1), rate=floats(1), counter=Counter(0, 0, 0, 0, 0), **given)  # type: ignore[arg-type]
    held = np.full(8, 7, np.uint8)
    call = bound.update_codes(update, c_uint32(), 2, np.zeros(8, np.float32), held)
    call()
    setattr(update, name, value)
    with pytest.raises(KernelError, match=f"{name}={value}"):
        call()
    assert held.tolist() == [7] * 8


def test_a_pull_beyond_every_code_moves_to_zero_and_no_further() -> None:
    given = {"bits": 4, "weight_decay": 0.0, "momentum": 0.0, "buffer": MomentumBuffer.zeros(8, 0)}
    update = CodeUpdate.of(8, step=floats(1), rate=floats(1), counter=Counter(0, 0, 0, 0, 0), **given)  # type: ignore[arg-type]
    update.pull_by(np.full(8, np.float32(3e38)))
    held = np.arange(8, 16, dtype=np.uint8)
    bound.update_codes(update, c_uint32(), 2, np.zeros(8, np.float32), held)()
    assert held.tolist() == [8] * 8


def test_null_pointers_and_bits_are_refused_by_the_library_itself() -> None:
    """Python refuses them before; another caller of the library may not."""
    some = np.zeros(64, np.uint8).ctypes.data
    counts = np.zeros(8, np.int64).ctypes.data
    for bits in (-MOST, 0, 9, MOST):
        assert library.fedmpq_pack_planes(some, 8, bits, some) == -4
        assert library.fedmpq_unpack_planes(some, 8, bits, some) == -4
        assert library.fedmpq_popcount_planes(some, 1, bits, counts) == -4
        assert library.fedmpq_magnitude_counts(some, 8, bits, counts) == -4
    assert library.fedmpq_pack_planes(some, -1, 4, some) == -4
    assert library.fedmpq_pack_planes(None, 8, 4, some) == -4
    assert library.fedmpq_philox_uniform(-1, 0, 0, 0, 0, 0, some) == -4
    assert library.fedmpq_philox_uniform(2**34 + 1, 0, 0, 0, 0, 0, some) == -4
    assert library.fedmpq_add_errors(None, 4, some) == -4
    assert library.fedmpq_conv_forward(None, None, None, 0, 1, None, None) == -4
