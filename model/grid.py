"""The grid of a quantized weight: `W = step * (code - zero_point)`.

A weight of `bits` bits is stored as an unsigned code in `[0, 2^bits - 1]`. The zero point is `(2^bits - 1)/2`
for `bits < 8`, which makes the grid symmetric, uses every code, and makes one bit the useful pair `±step/2`.
It is `128` for `bits = 8`, where code 0 stays unused, so that the integer weight fits ±127 on every inference
runtime.

Kernels and exporters never see the half-integer zero point: they use the *integer weight*
`2*code - (2^bits - 1)` with scale `step/2` (`bits < 8`), or `code - 128` with scale `step` (`bits = 8`).

A step is one float32 per layer (shape `()`) or one per output channel (shape `(out,)`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import grid_noise, least_error_grids

MAX_BITS = 8
FAST_BITS = 6
"""Up to here integer weights lie within ±63: two products with bytes fit 16 bits, as fast kernels need."""
# A layer of zeros still needs a positive step; this is far below any trained weight, far above denormals.
MIN_STEP = np.float32(2.0**-30)
# Squares of larger weights would overflow; weights this large are of a training that has diverged.
MAX_WEIGHT = 2.0**60

_SEARCHED = 1 << 17
"""Of a row with twice as many weights or more, about so many are searched on."""
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
    low, high = code_range(bits)
    _check_weights(weights)
    _check_step(step)
    scaled = weights / along_rows(step, weights.ndim)
    codes = np.clip(np.rint(scaled + np.float32(zero_point(bits))), low, high)
    return np.asarray(codes, dtype=np.uint8)


def dequantize(codes: NDArray[np.uint8], step: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """`W = step * (code - zero_point)`."""
    centred = codes.astype(np.float32) - np.float32(zero_point(bits))
    return np.asarray(centred * along_rows(step, codes.ndim), dtype=np.float32)


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
    check_bits(bits)
    return _as_steps(_spanning(_rows(weights, per_channel), bits), per_channel)


def least_error_step(
    weights: NDArray[np.float32], bits: int, per_channel: bool = False
) -> NDArray[np.float32]:
    """The step with the least `sum (W - quantized W)^2`, never one with a larger error than `max_step`'s.

    The error over the step is a wide valley with many dents, somewhere between a grid as wide as a fraction
    of the deviation and one that spans the weights. Ever finer searches find its floor, on a sample where
    there are many weights; alternating (codes for the step, then `step = sum W t / sum t^2` with
    `t = code - zero_point`) settles it on all of them.
    """
    check_bits(bits)
    (steps, _), *_ = least_error_grids([_rows(weights, per_channel)], [(0, bits)], _SEARCHED, 1)
    return _as_steps(steps, per_channel)


def least_errors(
    weights: Mapping[str, NDArray[np.float32]],
    wanted: Sequence[tuple[str, int]],
    per_channel: bool,
    threads: int,
) -> list[tuple[NDArray[np.float32], float]]:
    """`least_error_step` of many layers at bit-widths, each with its `noise_power`, all at once."""
    names = list(dict.fromkeys(name for name, _ in wanted))
    places = {name: place for place, name in enumerate(names)}
    rows = [_rows(weights[name], per_channel) for name in names]
    found = least_error_grids(rows, [(places[name], bits) for name, bits in wanted], _SEARCHED, threads)
    return [(_as_steps(steps, per_channel), float(noise.sum())) for steps, noise in found]


def noise_power(weights: NDArray[np.float32], step: NDArray[np.float32], bits: int) -> float:
    """`sum (W - quantized W)^2`, rounded differences squared and added in double precision."""
    steps = np.atleast_1d(step)
    _check_weights(weights)
    _check_step(steps)
    return float(grid_noise(weights.reshape(len(steps), -1), steps, bits).sum())


STEP_RULES: dict[StepRule, Callable[[NDArray[np.float32], int, bool], NDArray[np.float32]]] = {
    "max": max_step,
    "least_error": least_error_step,
}


def _spanning(rows: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """The step of each row with which the grid just reaches its largest weight."""
    steps = np.float32(2.0 / (2**bits - 1)) * np.abs(rows).max(axis=1)
    return np.asarray(np.maximum(steps, MIN_STEP), dtype=np.float32)


def _rows(weights: NDArray[np.float32], per_channel: bool) -> NDArray[np.float32]:
    """One row for each step: the output channels, or the whole layer."""
    if weights.size == 0:
        raise GridError("cannot choose a step for a layer without weights")
    _check_weights(weights)
    return weights.reshape(weights.shape[0] if per_channel else 1, -1)


def _check_weights(weights: NDArray[np.float32]) -> None:
    # Not (x <= limit) is true of NaN too.
    if not np.abs(weights).max(initial=0) <= MAX_WEIGHT:
        raise GridError(f"weights must be finite and within ±{MAX_WEIGHT:g}; these have diverged")


def _check_step(step: NDArray[np.float32]) -> None:
    if not (np.isfinite(step).all() and (step > 0).all()):
        raise GridError("a step must be positive and finite")


def _as_steps(steps: NDArray[np.float32], per_channel: bool) -> NDArray[np.float32]:
    return np.asarray(steps if per_channel else steps[0], dtype=np.float32)


def along_rows(step: NDArray[np.float32], ndim: int) -> NDArray[np.float32]:
    """A step in the shape that multiplies a weight of `ndim` dimensions."""
    return step if step.ndim == 0 else step.reshape(-1, *(1,) * (ndim - 1))
