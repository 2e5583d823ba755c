"""The grid of a quantized weight: `W = step * (code - zero_point)`.

A weight of `bits` bits is stored as an unsigned code in `[0, 2^bits - 1]`. The zero point is `(2^bits - 1)/2` for
`bits < 8`, which makes the grid symmetric, uses every code, and makes one bit the useful pair `±step/2`; it is `128`
for `bits = 8`, where code 0 stays unused so that the integer weight fits ±127 on every inference runtime.

Kernels and exporters never see the half-integer zero point: they use the *integer weight*
`2*code - (2^bits - 1)` with scale `step/2` (`bits < 8`), or `code - 128` with scale `step` (`bits = 8`).

A step is one float32 per layer (shape `()`) or one per output channel (shape `(out,)`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

MAX_BITS = 8
# A layer of zeros still needs a positive step; this one is far below any trained weight and far above denormals.
MIN_STEP = np.float32(2.0**-30)

StepRule = Literal["max", "least_error"]


class GridError(ValueError):
    """A weight, step or bit-width that no grid can hold."""


def check_bits(bits: int) -> None:
    """Refuse a bit-width outside 1..8."""
    if not 1 <= bits <= MAX_BITS:
        raise GridError(f"bit-width {bits} is outside 1..{MAX_BITS}")


def zero_point(bits: int) -> float:
    """`(2^bits - 1)/2` below 8 bits, `128` at 8."""
    check_bits(bits)
    return 128.0 if bits == MAX_BITS else (2**bits - 1) / 2


def code_range(bits: int) -> tuple[int, int]:
    """The lowest and highest code in use: `(0, 2^bits - 1)`, and `(1, 255)` at 8 bits."""
    check_bits(bits)
    return (1 if bits == MAX_BITS else 0), 2**bits - 1


def quantize(weights: NDArray[np.float32], step: NDArray[np.float32], bits: int) -> NDArray[np.uint8]:
    """`code = clip(rint(W/step + zero_point))`, in the shape of `weights`."""
    if not np.isfinite(weights).all():
        raise GridError("cannot quantize weights with NaN or infinity in them")
    low, high = code_range(bits)
    scaled = weights / _along_rows(step, weights.ndim)
    return np.clip(np.rint(scaled + np.float32(zero_point(bits))), low, high).astype(np.uint8)


def dequantize(codes: NDArray[np.uint8], step: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """`W = step * (code - zero_point)`."""
    centred = codes.astype(np.float32) - np.float32(zero_point(bits))
    return np.asarray(centred * _along_rows(step, codes.ndim), dtype=np.float32)


def integer_weights(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int8]:
    """`2*code - (2^bits - 1)` below 8 bits, `code - 128` at 8: always within ±127."""
    check_bits(bits)
    wide = codes.astype(np.int16)
    return (wide - 128 if bits == MAX_BITS else 2 * wide - (2**bits - 1)).astype(np.int8)


def integer_scale(step: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """The scale of `integer_weights`: `step/2` below 8 bits, `step` at 8. Halving is exact."""
    check_bits(bits)
    return step if bits == MAX_BITS else np.asarray(step * np.float32(0.5), dtype=np.float32)


def max_step(weights: NDArray[np.float32], bits: int, per_channel: bool = False) -> NDArray[np.float32]:
    """The paper's step: `2*max|W| / (2^bits - 1)`, so that the grid spans the weights."""
    rows = _rows(weights, per_channel)
    steps = np.float32(2.0 / (2**bits - 1)) * np.abs(rows).max(axis=1)
    return _as_steps(steps, per_channel)


def least_error_step(weights: NDArray[np.float32], bits: int, per_channel: bool = False) -> NDArray[np.float32]:
    """The step with the least `sum (W - quantized W)^2`.

    The error over the step is almost, not quite, unimodal: a coarse search over multiples of the standard deviation
    finds the valley, and alternating (codes for the step, then `step = sum W t / sum t^2` with `t = code - zero_point`)
    walks to its floor; each alternation can only lower the error.
    """
    rows = _rows(weights, per_channel)
    sample = rows[:, :: max(1, rows.shape[1] // _SEARCH_SAMPLE)]
    deviation = np.maximum(np.sqrt(np.mean(np.square(sample), axis=1)), MIN_STEP)
    candidates = deviation[:, None] * np.float32(_DEVIATIONS[bits - 1]) * _SPREAD
    errors = np.stack([_row_errors(sample, candidates[:, j], bits) for j in range(len(_SPREAD))], axis=1)
    steps = candidates[np.arange(len(rows)), errors.argmin(axis=1)]
    for _ in range(_ALTERNATIONS):
        steps = _refit(rows, steps, bits)
    return _as_steps(steps, per_channel)


STEP_RULES: dict[StepRule, Callable[[NDArray[np.float32], int, bool], NDArray[np.float32]]] = {
    "max": max_step,
    "least_error": least_error_step,
}

# Least-error steps of trained ResNet-20 layers, in standard deviations, for 1..8 bits: where the search starts.
_DEVIATIONS = (1.6, 1.01, 0.63, 0.38, 0.22, 0.13, 0.071, 0.039)
_SPREAD = np.geomspace(0.4, 2.5, 15).astype(np.float32)
_ALTERNATIONS = 4
_SEARCH_SAMPLE = 1 << 15


def _row_errors(rows: NDArray[np.float32], steps: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    difference = rows - dequantize(quantize(rows, steps, bits), steps, bits)
    return np.asarray(np.square(difference).sum(axis=1), dtype=np.float32)


def _refit(rows: NDArray[np.float32], steps: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    centred = quantize(rows, steps, bits).astype(np.float32) - np.float32(zero_point(bits))
    energy = np.square(centred).sum(axis=1)
    fitted = (rows * centred).sum(axis=1) / np.maximum(energy, np.float32(1e-12))
    return np.asarray(np.where(energy > 0, np.maximum(fitted, MIN_STEP), steps), dtype=np.float32)


def _rows(weights: NDArray[np.float32], per_channel: bool) -> NDArray[np.float32]:
    """One row for each step: the output channels, or the whole layer."""
    if not np.isfinite(weights).all():
        raise GridError("cannot choose a step for weights with NaN or infinity in them")
    if weights.size == 0:
        raise GridError("cannot choose a step for a layer without weights")
    return weights.reshape(weights.shape[0] if per_channel else 1, -1)


def _as_steps(steps: NDArray[np.float32], per_channel: bool) -> NDArray[np.float32]:
    steps = np.maximum(steps, MIN_STEP).astype(np.float32)
    return steps if per_channel else np.asarray(steps[0], dtype=np.float32)


def _along_rows(step: NDArray[np.float32], ndim: int) -> NDArray[np.float32]:
    """A step in the shape that multiplies a weight of `ndim` dimensions."""
    return step if step.ndim == 0 else step.reshape(-1, *(1,) * (ndim - 1))
