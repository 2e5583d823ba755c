"""The step with which a grid has the least error, and the error of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.call import CheckedCall, Elements


def grid_noise(rows: NDArray[np.float32], steps: NDArray[np.float32], bits: int) -> NDArray[np.float64]:
    """`sum (w - q)^2` of each row, `q` the value of `w` on the grid of the row's step: the same to the bit as
    `np.square(rows - q, dtype=np.float64).sum(axis=1)`."""
    if rows.ndim != 2 or steps.shape != rows.shape[:1]:
        raise ValueError(f"rows {rows.shape} must have two axes, and a step each, not steps {steps.shape}")
    rows, steps = np.ascontiguousarray(rows), np.ascontiguousarray(steps)
    noise = np.empty(len(rows), np.float64)
    CheckedCall(
        "fedmpq_grid_noise",
        Elements(rows, rows.size),
        *rows.shape,
        Elements(steps, steps.size),
        bits,
        Elements(noise, noise.size),
    )()
    return noise


def least_error_grids(
    layers: Sequence[NDArray[np.float32]], wanted: Sequence[tuple[int, int]], searched: int, threads: int
) -> list[tuple[NDArray[np.float32], NDArray[np.float64]]]:
    """For each of `wanted`, the index of a layer of rows and a bit-width: the steps of the rows with the
    least `sum (w - q)^2`, searched for on a sample where a row has twice `searched` weights or more, and what
    `grid_noise` gives for them."""
    counts, lengths = (np.array([rows.shape[axis] for rows in layers], np.int64) for axis in (0, 1))
    places = np.concatenate([[0], np.cumsum(counts * lengths)])
    of = np.array([layer for layer, _ in wanted], np.int64)
    bits = np.array([width for _, width in wanted], np.int32)
    firsts = np.concatenate([[0], np.cumsum(counts[of])])
    weights = np.concatenate([rows.reshape(-1) for rows in layers])
    steps, noise = np.empty(firsts[-1], np.float32), np.empty(firsts[-1], np.float64)
    CheckedCall(
        "fedmpq_least_error_grids",
        Elements(weights, weights.size),
        weights.size,
        *(Elements(each[of], of.size) for each in (places, counts, lengths)),
        Elements(bits, of.size),
        of.size,
        searched,
        threads,
        Elements(firsts, of.size),
        steps.size,
        Elements(steps, steps.size),
        Elements(noise, steps.size),
    )()
    cuts = firsts[1:-1]
    return list(zip(np.split(steps, cuts), np.split(noise, cuts), strict=True))
