"""The last layer, `float(bias + sum codes * weight) * scale`, in integers with a real result.

XNNPACK has one such product: its input is float32, which it quantizes row by row to 255 steps from the least
to the greatest value, zero among them. A feature of 255 beside codes of 0..255 makes that step 1 in every
row, so nothing is rounded, and the sums are whole numbers. Its bias is added in float32 behind the scale,
which rounds twice; so a bias here is `255 * t + r`, a product of weights too: of a feature of 1 by `r`, and
of features of 255 that share `t`, each within ±127.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from fedmpq.model.activations import CodeFormat

STEPS = 255
_GREATEST_WEIGHT = 127
# Beyond, the bias of a channel that hardly hears its input would cost more than sums in float32 do.
_MOST_COLUMNS = 64


def with_bias(
    weight: NDArray[np.int8], bias: NDArray[np.int32], source: CodeFormat
) -> NDArray[np.int8] | None:
    """The weight with columns that make the bias; None where float32 must add: signed codes, a huge bias."""
    if source.low != 0 or source.high > STEPS:
        return None
    whole = bias.astype(np.int64)
    rest = (whole + _GREATEST_WEIGHT) % STEPS - _GREATEST_WEIGHT
    times = (whole - rest) // STEPS
    count = max(1, -(-int(np.abs(times).max(initial=0)) // _GREATEST_WEIGHT))
    if count > _MOST_COLUMNS:
        return None
    # As evenly as whole numbers go.
    shares = [(times * (i + 1)) // count - (times * i) // count for i in range(count)]
    return np.concatenate([weight, np.stack([rest, *shares], axis=1).astype(np.int8)], axis=1)


def real_sums(codes: torch.Tensor, weight: torch.Tensor, columns: int) -> torch.Tensor:
    """The layer of codes as float32 (N, features); `weight` has so many `columns` for the bias."""
    one = functional.pad(codes, (0, 1), value=1.0)
    padded = functional.pad(one, (0, columns - 1), value=float(STEPS))
    operators = torch.ops.quantized_decomposed
    scale, zero = operators.choose_qparams_per_token_asymmetric(padded, torch.int8)
    bounds = scale, zero, -128, 127, torch.int8
    stored = operators.quantize_per_token(padded, *bounds)
    return functional.linear(operators.dequantize_per_token(stored, *bounds, torch.float32), weight)
