"""The operations of a quantized graph in torch, each with its backward pass written out.

An operation returns its value and a function from the gradient of the value to the gradients of its inputs.
Gradients are always with respect to *real* values; quantization passes them straight through. Between
operations a tensor holds either real numbers or integer codes (as floats) with a format that says what they
mean; what is kept for the backward pass of a product is the codes, packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from fedmpq.model.activations import CodeFormat
from fedmpq.model.graph import BatchNorm, Conv2d, Linear, Lookup
from fedmpq.model.lookup_tables import real_tables

EXACT_FLOAT32 = 2**24

Backward = Callable[[Tensor], tuple[Tensor | None, ...]]


@dataclass
class Packed:
    """Codes kept for the backward pass: two 4-bit codes a byte, or one byte each."""

    data: Tensor
    shape: tuple[int, ...]
    offset: int
    halves: bool

    @classmethod
    def pack(cls, codes: Tensor, form: CodeFormat) -> Packed:
        """Codes `(N, C, H, W)` or `(N, F)`; stored channels last, as they lie in memory."""
        rows = codes.permute(0, 2, 3, 1) if codes.ndim == 4 else codes
        flat = (rows.reshape(-1) - form.low).to(torch.uint8)
        halves = form.high - form.low <= 15
        if halves:
            if flat.numel() % 2:
                flat = functional.pad(flat, (0, 1))
            flat = flat[0::2] | (flat[1::2] << 4)
        return cls(flat, tuple(rows.shape), form.low, halves)

    def unpack(self) -> Tensor:
        """The codes again, as floats."""
        flat = self.data
        if self.halves:
            count = int(torch.Size(self.shape).numel())
            flat = torch.stack((flat & 15, flat >> 4), dim=1).reshape(-1)[:count]
        rows = flat.view(self.shape).to(torch.float32)
        if self.offset:
            rows += self.offset
        return rows.permute(0, 3, 1, 2) if rows.ndim == 4 else rows


@dataclass
class Value:
    """A tensor between operations: codes if `form` is set, else real numbers."""

    tensor: Tensor
    form: CodeFormat | None = None
    _packed: Packed | None = field(default=None, repr=False)

    def real(self) -> Tensor:
        return self.tensor if self.form is None else self.tensor * float(self.form.scale)

    def codes(self) -> tuple[Tensor, CodeFormat]:
        assert self.form is not None, "this operation reads codes; place_quantizers sees to that"
        return self.tensor, self.form

    def packed(self) -> Packed:
        """Packed once, however many layers read it."""
        if self._packed is None:
            self._packed = Packed.pack(*self.codes())
        return self._packed


@dataclass(frozen=True)
class LayerWeight:
    """A layer's weight while the layer computes: `real weight = tensor * scale`.

    For codes, `tensor` holds integers of at most `bound` in magnitude; `bound = 0` marks full precision.
    """

    tensor: Tensor
    scale: Tensor
    bound: int

    def real(self) -> Tensor:
        return self.tensor * _rows(self.scale, self.tensor.ndim)


def products(codes: Tensor, weight: Tensor, op: Conv2d | Linear, bound: int) -> Tensor:
    """Sums of products of integers, exact: as float32 where that can carry them, else as int32.

    `bound` is the greatest |code| times the greatest |weight|. float32 carries a sum exactly below 2^24; a
    longer one is cut along the input channels, and the parts are added as int32.
    """
    per_channel = bound if isinstance(op, Linear) else bound * op.kernel[0] * op.kernel[1]
    if per_channel * weight.shape[1] < EXACT_FLOAT32:
        return _product(codes, weight, op)
    span = (EXACT_FLOAT32 - 1) // per_channel
    if span == 0 or (isinstance(op, Conv2d) and op.groups > 1):
        return _product(codes.double(), weight.double(), op).to(torch.int32)
    parts = [
        _product(codes[:, i : i + span], weight[:, i : i + span], op).to(torch.int32)
        for i in range(0, weight.shape[1], span)
    ]
    return torch.stack(parts).sum(dim=0, dtype=torch.int32)


def _product(source: Tensor, weight: Tensor, op: Conv2d | Linear) -> Tensor:
    if isinstance(op, Linear):
        return source @ weight.t()
    return functional.conv2d(source, weight, None, op.stride, op.padding, op.dilation, op.groups)


def forward_product(value: Value, weight: LayerWeight, bias: Tensor | None, op: Conv2d | Linear) -> Value:
    """Convolution or linear layer: `acc * (s_x * s_w) + bias`."""
    codes, form = value.codes()
    if weight.bound:
        sums = products(codes, weight.tensor, op, form.bound * weight.bound).float()
    else:
        sums = _product(codes, weight.tensor, op)
    real = sums * _columns(weight.scale * float(form.scale), sums.ndim)
    return Value(real if bias is None else real + _columns(bias, sums.ndim))


def backward_product(
    packed: Packed, scale: float, weight: LayerWeight, op: Conv2d | Linear, gradient: Tensor, first: bool
) -> tuple[Tensor | None, Tensor]:
    """Gradients with respect to the input (none is needed at the image) and to the real weight."""
    codes, real = packed.unpack(), weight.real()
    if isinstance(op, Linear):
        return (None if first else gradient @ real), (gradient.t() @ codes) * scale
    wanted = [not first, True, False]
    source, weights, _ = torch.ops.aten.convolution_backward(
        gradient, codes, real, None, op.stride, op.padding, op.dilation, False, [0, 0], op.groups, wanted
    )
    return source, weights * scale


def batch_norm(
    value: Value, gamma: Tensor, beta: Tensor, mean: Tensor, variance: Tensor, op: BatchNorm, training: bool
) -> tuple[Value, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """BatchNorm by batch statistics (updating `mean` and `variance` in place), or by the running ones."""
    source = value.real()
    out, saved_mean, saved_scale = torch.ops.aten.native_batch_norm(
        source, gamma, beta, mean, variance, training, op.momentum, op.eps
    )

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        d_source, d_gamma, d_beta = torch.ops.aten.native_batch_norm_backward(
            gradient, source, gamma, mean, variance, saved_mean, saved_scale, training, op.eps, [True] * 3
        )
        return d_source, d_gamma, d_beta

    return Value(out), backward


def quantize(
    value: Value, form: CodeFormat, clip_is_free: bool
) -> tuple[Value, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Codes `clamp(rint(x / scale))`; the gradient passes inside the range, and what is cut moves the clip.

    `d clip = sum of gradients above - sum of gradients below (signed only)`; zero where a ReLU6 bounds it.
    """
    real = value.real()
    top = float(form.scale) * form.high
    bottom = -top if form.low < 0 else 0.0
    codes = torch.round(real / float(form.scale)).clamp_(form.low, form.high)
    above, below = real >= top, real <= bottom

    def backward(gradient: Tensor) -> tuple[Tensor, Tensor]:
        d_clip = torch.zeros(())
        if clip_is_free:
            d_clip = gradient[above].sum()
            if form.low < 0:
                d_clip = d_clip - gradient[below].sum()
        return gradient.masked_fill(above | below, 0.0), d_clip

    return Value(codes.float(), form), backward


def add(left: Value, right: Value) -> tuple[Value, Backward]:
    return Value(left.real() + right.real()), lambda gradient: (gradient, gradient)


def multiply(left: Value, right: Value) -> tuple[Value, Backward]:
    """A product of codes times both scales; errors of a right factor of one pixel are summed over all."""
    (a, a_form), (b, b_form) = left.codes(), right.codes()
    packed = left.packed(), right.packed()
    axes = [axis for axis in range(2, a.ndim) if a.shape[axis] != b.shape[axis]]

    def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
        a_real, b_real = (
            each.unpack() * float(form.scale) for each, form in zip(packed, (a_form, b_form), strict=True)
        )
        right_gradient = gradient * a_real
        return gradient * b_real, right_gradient.sum(dim=axes, keepdim=True) if axes else right_gradient

    return Value(a * b * float(a_form.scale * b_form.scale)), backward


def lookup(value: Value, op: Lookup) -> tuple[Value, Backward]:
    """A function of codes, in float64 as the integer program has it, and its slope at each code."""
    codes, form = value.codes()
    values, slopes = map(torch.from_numpy, real_tables(op, form))
    places, packed = (codes - form.low).long(), value.packed()

    def backward(gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (gradient * slopes[(packed.unpack() - form.low).long()],)

    return Value(values[places]), backward


def _rows(scale: Tensor, ndim: int) -> Tensor:
    """A per-output-channel vector in the shape that multiplies a weight."""
    return scale if scale.ndim == 0 else scale.reshape(-1, *(1,) * (ndim - 1))


def _columns(scale: Tensor, ndim: int) -> Tensor:
    """A per-channel vector in the shape that multiplies an activation."""
    return scale if scale.ndim == 0 else scale.reshape(1, -1, *(1,) * (ndim - 2))
