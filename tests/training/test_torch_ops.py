"""The operations of the torch engine: exact integer sums, packing, rounding and the loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional

from fedmpq.model.activations import CodeFormat
from fedmpq.model.graph import (
    AvgPool,
    Conv2d,
    GlobalAvgPool,
    Linear,
)
from fedmpq.model.integer_forward import numpy_products
from fedmpq.training import torch_losses, torch_ops, torch_shapes
from fedmpq.training.torch_ops import LayerWeight, Packed, Value
from tests.training.straight_through import assert_close, conv
from tests.training.torch_products import integer_products

pytestmark = pytest.mark.usefixtures("one_thread")


def naive_products(
    codes: NDArray[np.int64], weight: NDArray[np.int64], op: Conv2d | Linear
) -> NDArray[np.int64]:
    """Sums over each window in int64; codes `(N, C, H, W)` or `(N, F)`."""
    if isinstance(op, Linear):
        return np.asarray(codes @ weight.T)
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = op.kernel, op.stride, op.padding, op.dilation
    padded = np.pad(codes, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
    height = (padded.shape[2] - dh * (kh - 1) - 1) // sh + 1
    width = (padded.shape[3] - dw * (kw - 1) - 1) // sw + 1
    out = np.zeros((len(codes), op.out_channels, height, width), np.int64)
    per_group, out_per_group = op.in_channels // op.groups, op.out_channels // op.groups
    for channel in range(op.out_channels):
        first = channel // out_per_group * per_group
        for y in range(height):
            for x in range(width):
                window = padded[:, first : first + per_group, y * sh :, x * sw :]
                window = window[:, :, : dh * (kh - 1) + 1 : dh, : dw * (kw - 1) + 1 : dw]
                out[:, channel, y, x] = (window * weight[channel]).sum(axis=(1, 2, 3))
    return out


LARGE: dict[str, tuple[Conv2d | Linear, tuple[int, ...]]] = {
    "linear": (Linear(2000, 3, False), (2000,)),
    "linear, the widest": (Linear(65536, 2, False), (65536,)),
    "channels": (conv(150, 3, padding=(1, 1), stride=(2, 1), dilation=(1, 2)), (150, 6, 6)),
    "groups": (conv(300, 4, groups=2), (300, 4, 3)),
    "one channel is too much": (conv(3, 2, 24), (3, 24, 25)),
    "small": (conv(5, 3, padding=(1, 1)), (5, 4, 4)),
}


@pytest.mark.parametrize("name", LARGE)
def test_products_are_exact_whatever_their_size(name: str) -> None:
    """Extreme codes and weights, so that true sums pass 2^24 and are odd: float32 cannot even hold them."""
    op, shape = LARGE[name]
    random = np.random.default_rng(3)
    codes = random.integers(253, 256, (2, *shape))
    weight = random.integers(125, 128, op.weight_shape) * np.where(
        random.random(op.weight_shape) < 0.02, -1, 1
    )
    expected = naive_products(codes, weight, op)
    if name != "small":
        assert np.abs(expected).max() > 2**24
        assert (expected != expected.astype(np.float32).astype(np.int64)).any()
    source, integers = torch.from_numpy(codes).float(), torch.from_numpy(weight).float()
    got = torch_ops.products(source, integers, op, 255 * 127)
    assert np.array_equal(got.to(torch.int64).numpy(), expected)

    rows = np.ascontiguousarray(codes.transpose(0, 2, 3, 1) if codes.ndim == 4 else codes).astype(np.int32)
    by_engine = integer_products(rows, weight.astype(np.int8), op, 255)
    assert by_engine.dtype == np.int32
    assert np.array_equal(by_engine, numpy_products(rows, weight.astype(np.int8), op, 255))
    assert np.array_equal(by_engine.transpose(0, 3, 1, 2) if by_engine.ndim == 4 else by_engine, expected)


def test_products_are_the_same_on_two_threads() -> None:
    random = np.random.default_rng(4)
    op = conv(64, 16, padding=(1, 1))
    codes = torch.from_numpy(random.integers(0, 16, (4, 64, 16, 16))).float()
    weight = torch.from_numpy(random.integers(-127, 128, op.weight_shape)).float()
    alone = torch_ops.products(codes, weight, op, 15 * 127)
    torch.set_num_threads(2)
    assert torch.equal(torch_ops.products(codes, weight, op, 15 * 127), alone)


formats = st.sampled_from(
    [
        CodeFormat(np.float32(0.1), 0, 15),
        CodeFormat(np.float32(0.1), 0, 3),
        CodeFormat(np.float32(0.1), -7, 7),
        CodeFormat(np.float32(0.1), 0, 255),
        CodeFormat(np.float32(0.1), -127, 127),
        CodeFormat(np.float32(0.1), -120, 135),
    ]
)


@given(
    formats,
    st.one_of(st.tuples(*[st.integers(1, 5)] * 2), st.tuples(*[st.integers(1, 5)] * 4)),
    st.integers(0, 9),
)
def test_packing_loses_nothing(form: CodeFormat, shape: tuple[int, ...], seed: int) -> None:
    codes = torch.from_numpy(np.random.default_rng(seed).integers(form.low, form.high + 1, shape)).float()
    packed = Packed.pack(codes, form)
    again = packed.unpack()
    assert again.dtype == torch.float32
    assert torch.equal(again, codes)
    assert torch.equal(packed.unpack(), codes)
    per_byte = 2 if form.high - form.low <= 15 else 1
    assert packed.data.dtype == torch.uint8
    assert packed.data.nbytes == packed.data.untyped_storage().nbytes() == -(-codes.numel() // per_byte)


def test_a_value_is_packed_once() -> None:
    value = Value(torch.ones(2, 3), CodeFormat(np.float32(0.5), 0, 15))
    assert value.packed() is value.packed()


@pytest.mark.parametrize("signed", [False, True])
def test_quantize_rounds_half_to_even_and_clips(signed: bool) -> None:
    form = CodeFormat.quantized(np.float32(3.5 if signed else 7.5), 0.0, 4, signed)
    assert form.scale == 0.5
    steps = [-30.0, -7.2, -1.5, -0.5, 0.0, 0.5, 1.5, 2.5, 6.4999995, 7.0, 14.5, 30.0, math.inf]
    low, high = (-7, 7) if signed else (0, 15)
    value, _ = torch_ops.quantize(Value(torch.tensor(steps) * 0.5), form, True)
    assert value.form == form
    assert value.tensor.tolist() == np.clip(np.rint(steps), low, high).tolist()


@pytest.mark.parametrize(("low", "high"), [(0, 15), (-127, 127), (0, 255), (0, 3)])
def test_averages_equal_the_integer_program(low: int, high: int) -> None:
    """Ties and all: `rint(float32(sum) * multiplier)`, with the program's float32 multiplier."""
    random = np.random.default_rng(7)
    for clip in (0.7, 1.0, 2.9, 6.0):
        form = CodeFormat(np.float32(np.float32(clip) / np.float32(high)), low, high)
        codes = random.integers(low, high + 1, (3, 4, 4, 6))
        for op in (GlobalAvgPool(), AvgPool((2, 2), (2, 2), (1, 0)), AvgPool((2, 3), (1, 2), (0, 1))):
            value, _ = torch_shapes.average_pool(Value(torch.from_numpy(codes).float(), form), op)
            kernel, stride, (ph, pw) = (4, 6), (1, 1), (0, 0)
            if isinstance(op, AvgPool):
                kernel, stride, (ph, pw) = op.kernel, op.stride, op.padding
            padded = np.pad(codes, ((0, 0), (0, 0), (ph, ph), (pw, pw)))
            windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=(2, 3))
            sums = windows[:, :, :: stride[0], :: stride[1]].sum(axis=(4, 5)).astype(np.float32)
            target = form.averaged()
            multiplier = np.float32(form.scale / (target.scale * np.float32(kernel[0] * kernel[1])))
            expected = np.clip(np.rint(sums * multiplier), target.low, target.high)
            assert value.form == target
            assert np.array_equal(value.tensor.numpy(), expected)


def test_cross_entropy_equals_autograd() -> None:
    random = np.random.default_rng(2)
    logits = torch.tensor(random.normal(0, 5, (7, 4)), requires_grad=True)
    labels = torch.from_numpy(random.integers(0, 4, 7))
    expected = functional.cross_entropy(logits, labels)
    expected.backward()
    assert logits.grad is not None
    loss, right, gradient = torch_losses.cross_entropy(logits.detach().float(), labels)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert right == int((logits.argmax(1) == labels).sum())
    assert_close(gradient, logits.grad, "logits", 1e-6)


def test_full_precision_weights_are_not_rounded() -> None:
    """`bound = 0`: products of codes and real weights, as the accuracy of W itself needs them."""
    form = CodeFormat(np.float32(0.25), 0, 15)
    codes = torch.tensor([[1.0, 2.0], [15.0, 0.0]])
    weight = LayerWeight(torch.tensor([[0.3, -0.7]]), torch.ones(()), 0)
    value = torch_ops.forward_product(Value(codes, form), weight, torch.tensor([1.0]), Linear(2, 1, True))
    np.testing.assert_allclose(value.tensor.numpy(), [[1 + 0.25 * (0.3 - 1.4)], [1 + 0.25 * 4.5]], rtol=1e-6)
