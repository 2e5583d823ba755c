"""What a layer's weights have moved by in a round, on a grid of its own.

Under the carried rule of training a weight lies at `256 code + fraction`, so its change is a whole number `d`
of 256ths of the model's step. The change is returned with as many bits a weight as the model has, but on a
finer grid: `d ~ j (c - zero_point)` with codes `c` as in `model.grid` and one whole number `j`, the one with
the least squared error of those tried. A layer with one step per output channel has one `j` per channel.

All of it is integer arithmetic: every board finds the same `j` and codes, and sums over boards are exact.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.grid import MAX_BITS, along_rows, code_range, dequantize, quantize
from fedmpq.model.quantized import QuantizedLayer

FRACTIONS = 256
"""Places between a code and the next."""
MAX_CHANGE_STEP = 2 * FRACTIONS * 2**MAX_BITS
"""The greatest `j`: the grid then spans a move from one end of the codes to the other even at one bit."""

Fractions: TypeAlias = NDArray[np.int8]
_Change: TypeAlias = NDArray[np.int64]

_ROUNDS = 3
_TRIED = 12
_DENSE = 8
"""Changes are counted in an array of their range, unless that is so many times as long as the row."""


def change_of(sent: QuantizedLayer, trained: QuantizedLayer, fractions: Fractions) -> QuantizedLayer:
    """The change from `sent` to `trained` as codes with the step `j`, in 256ths of the model's own step."""
    moved = (trained.codes.astype(np.int64) - sent.codes) * FRACTIONS + fractions.reshape(sent.codes.shape)
    rows = moved.reshape(max(1, sent.step.size), -1)
    steps = [_least_error_step(row, sent.bits) for row in rows]
    codes = np.concatenate([_coded(row, step, sent.bits) for row, step in zip(rows, steps, strict=True)])
    return QuantizedLayer(
        codes.reshape(sent.codes.shape), sent.bits, np.array(steps, np.float32).reshape(sent.step.shape)
    )


def change_in_weights(change: QuantizedLayer, sent: QuantizedLayer) -> NDArray[np.float32]:
    """The change as real numbers: `j (c - zero_point) step / 256`."""
    return dequantize(change.codes, change.step * (sent.step / np.float32(FRACTIONS)), change.bits)


def change_within_cells(
    weights: NDArray[np.float32], sent: QuantizedLayer, change: QuantizedLayer
) -> NDArray[np.float32]:
    """What a client's change does to the weights `W` that its codes were made of: `W' - W`, with

        W' = W + change, kept within half a step of the code that the client ended with.

    The client computed with codes: as long as one stays the same, the gradient does not see what its fraction
    gathers, and goes on. Where `W` lies near the next code, the sum of both would turn over codes that the
    client has not, many at once and none of them tried.
    """
    moved = change_in_weights(change, sent)
    low, high = code_range(sent.bits)
    ended = quantize(sent.weights() + moved, sent.step, sent.bits)
    centre = dequantize(ended, sent.step, sent.bits)
    half = along_rows(sent.step, weights.ndim) / np.float32(2)
    least = np.where(ended > low, centre - half, -np.inf)
    most = np.where(ended < high, centre + half, np.inf)
    kept: NDArray[np.float32] = np.clip(weights + moved, least, most).astype(np.float32) - weights
    return kept


def _coded(change: _Change, step: int, bits: int, odd: _Change | None = None) -> NDArray[np.uint8]:
    """The code of the value on the grid nearest to each change of a row; `odd` has 1 for those that stand at
    an odd place of the row, by default every other one."""
    low, high = code_range(bits)
    if bits == MAX_BITS:
        codes = (2 * change + step) // (2 * step) + 128
    else:
        # Below 8 bits the grid has no zero: a weight that did not move lies half-way between two values. It
        # takes the lower one at every other place, for weights that nobody trains must not drift.
        odd = np.arange(change.size) & 1 if odd is None else odd
        codes = (change + (step << (bits - 1)) - odd) // step
    return np.clip(codes, low, high).astype(np.uint8)


def _least_error_step(change: _Change, bits: int) -> int:
    """The best of a geometric series of whole steps up to one that spans the change, then of finer ones."""
    reach = 254 if bits == MAX_BITS else 2**bits - 1
    spanning: int = max(1, -(-2 * int(np.abs(change).max(initial=0)) // reach))
    low, best, high = 1, spanning, spanning
    distinct, times = _counted(change)
    for _ in range(_ROUNDS):
        tried = sorted({best, *(_between(low, high, i) for i in range(_TRIED))})
        errors = [_squared_error(distinct, times, step, bits) for step in tried]
        place = errors.index(min(errors))
        best, low, high = tried[place], tried[max(0, place - 1)], tried[min(len(tried) - 1, place + 1)]
    return best


def _between(low: int, high: int, place: int) -> int:
    """The whole number nearest to `low (high/low)^(place/(_TRIED - 1))`.

    Only an exact tie could come out differently where libraries differ in a power's last bit, and a power
    that is no whole number is irrational: there is none.
    """
    nearest: int = round(low * (high / low) ** (place / (_TRIED - 1)))
    return nearest


def _counted(change: _Change) -> tuple[_Change, _Change]:
    """Every change of a row that there is, twice and plus 1 at odd places of the row, and how often each
    occurs: weights are many, and their changes are whole numbers of a small range."""
    twice = 2 * change + (np.arange(change.size) & 1)
    least = int(twice.min(initial=0))
    if int(twice.max(initial=0)) - least > _DENSE * change.size:
        distinct, times = np.unique(twice, return_counts=True)
        return distinct, times
    times = np.bincount(twice - least)
    found = np.flatnonzero(times)
    return found + least, times[found]


def _squared_error(distinct: _Change, times: _Change, step: int, bits: int) -> int:
    """Four times the squared error: twice a half-integer zero point is whole."""
    change, odd = distinct >> 1, distinct & 1
    twice_zero = 256 if bits == MAX_BITS else 2**bits - 1
    twice_kept = step * (2 * _coded(change, step, bits, odd).astype(np.int64) - twice_zero)
    return int((np.square(2 * change - twice_kept) * times).sum())
