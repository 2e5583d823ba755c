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

from fedmpq.kernels.changes import code_changes
from fedmpq.model.grid import MAX_BITS, along_rows, code_range, dequantize, quantize
from fedmpq.model.quantized import QuantizedLayer

FRACTIONS = 256
"""Places between a code and the next."""
MAX_CHANGE_STEP = 2 * FRACTIONS * 2**MAX_BITS
"""The greatest `j`: the grid then spans a move from one end of the codes to the other even at one bit."""

Fractions: TypeAlias = NDArray[np.int8]


def change_of(sent: QuantizedLayer, trained: QuantizedLayer, fractions: Fractions) -> QuantizedLayer:
    """The change from `sent` to `trained` as codes with the step `j`, in 256ths of the model's own step."""
    rows = max(1, sent.step.size)
    steps, codes = code_changes(sent.codes, trained.codes, fractions, rows, sent.bits)
    return QuantizedLayer(
        codes.reshape(sent.codes.shape), sent.bits, steps.astype(np.float32).reshape(sent.step.shape)
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
