"""Errors of weights on grids of several steps, as the search for the best step needs them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.call import CheckedCall, Elements


def grid_errors(rows: NDArray[np.float32], steps: NDArray[np.float32], bits: int) -> NDArray[np.float32]:
    """errors[r, k] = sum_j (w - q)^2 of w = rows[r, j] and its value q on the grid of steps[r, k] and `bits`.

    The same to the bit as `np.square(rows - q).sum(axis=1)` in single precision.
    """
    if rows.ndim != 2 or steps.ndim != 2 or len(rows) != len(steps):
        raise ValueError(f"rows {rows.shape} and steps {steps.shape} must have two axes, the first the same")
    rows, steps = np.ascontiguousarray(rows), np.ascontiguousarray(steps)
    errors = np.empty(steps.shape, np.float32)
    CheckedCall(
        "fedmpq_grid_errors",
        Elements(rows, rows.size),
        *rows.shape,
        Elements(steps, steps.size),
        steps.shape[1],
        bits,
        Elements(errors, errors.size),
    )()
    return errors
