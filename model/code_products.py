"""Products of two tensors of codes: what a `Mul` node computes.

Codes `a` and `b` of scales `s_a` and `s_b` make the whole number `a * b`, which stands for `s_a * s_b` times
itself. What is rounded from it is `clamp(rint(float(a * b) * M), low, high)` with `M = s_a * s_b / s_y`,
float32 in this order: a `Requantize` step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MultiplyCodes:
    """`left * right` in int32; a right factor of one pixel multiplies all pixels of its channel."""

    output: str
    left: str
    right: str


@dataclass(frozen=True)
class ProductOfCodes:
    """Whole numbers that stand for `scale` times themselves, before they are rounded to codes."""

    scale: np.float32
