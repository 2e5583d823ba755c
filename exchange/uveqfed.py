"""UVeQFed's uploads (Shlezinger et al. 2020): subtractive dithered quantization on a hexagonal lattice.

Weights are taken in pairs ``x`` (an odd one out is paired with a zero). With a dither ``z`` uniform on the
lattice's Voronoi cell and known to both sides, the client sends the lattice point ``q = Q(x / step + z)``
and the server takes ``x' = step * (q - z)``. The error ``x' - x`` is then uniform on the cell scaled by the
step, whatever ``x`` is: unbiased, with variance ``G2 * A`` a weight, ``G2 = 5 / (36 sqrt 3)`` and cell area
``A = step^2 * sqrt(3) / 2``.

The lattice has distance 1 between neighbours: points ``(column + (row mod 2) / 2, row * sqrt(3) / 2)``. Its
points are entropy coded as rows first, then columns given the row. Empirical entropy means that of this
coder: a histogram of whole points is no use above 4 bits or so, where most points occur once.

Stored form: the step as a little-endian float64; then, unless the step is 0 (an update of zeros), rows and
columns as ``entropy_coder`` stores them.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange import entropy_coder
from fedmpq.exchange.compression import PayloadError, UpdateError, flat_uniforms, flat_update

MIN_BITS = 1
MAX_BITS = 8

_SQRT3 = math.sqrt(3.0)
_STEP = struct.Struct("<d")

# Steps looked at, as powers of two of the largest weight. Below the finest, float32 has no more to tell; only
# an update nearly all of zeros gets there, and it then costs less than its budget.
_COARSEST, _FINEST = 6.0, -30.0
# So many bits a weight may be left unused; or, where the cost jumps, a step this near to the best be taken.
_BITS_TOLERANCE = 0.0014
_STEP_TOLERANCE = 0.0014


@dataclass(frozen=True)
class UVeQFedPayload:
    """One encoded tensor. The receiver knows the shape already; the data is what is sent."""

    shape: tuple[int, ...]
    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: step, histograms and coded points."""
        return len(self.data)


def uniforms_needed(weights: int) -> int:
    """How many dither uniforms an update of so many weights takes: two per pair."""
    return weights + weights % 2


def encode(delta: NDArray[np.float32], bits: float, dither_uniforms: NDArray[np.floating]) -> UVeQFedPayload:
    """Encode an update at an empirical entropy of at most, and as near as can be to, ``bits`` a weight."""
    if not MIN_BITS <= bits <= MAX_BITS:
        raise UpdateError(f"bits is {bits}; UVeQFed is run at {MIN_BITS}..{MAX_BITS} bits a weight")
    update = flat_update(delta)
    dither = _dither(flat_uniforms(dither_uniforms, uniforms_needed(update.size)))
    if not update.any():
        return UVeQFedPayload(delta.shape, _STEP.pack(0.0))
    pairs = _pairs(update)
    step = _step_for(pairs, dither, bits * update.size)
    rows, columns = nearest_points(pairs / step + dither)
    coded_rows = entropy_coder.encode(rows, np.zeros(rows.shape, np.uint8))
    coded_columns = entropy_coder.encode(columns, _contexts(rows))
    return UVeQFedPayload(delta.shape, _STEP.pack(step) + coded_rows + coded_columns)


def decode(payload: UVeQFedPayload, dither_uniforms: NDArray[np.floating]) -> NDArray[np.float32]:
    """The update that the payload stands for, given the same dither as its encoder had."""
    count = math.prod(payload.shape)
    if count == 0:
        raise PayloadError(f"shape {payload.shape} has no weights; no payload stands for it")
    dither = _dither(flat_uniforms(dither_uniforms, uniforms_needed(count)))
    if len(payload.data) < _STEP.size:
        raise PayloadError(f"the payload has {len(payload.data)} bytes; its step alone has {_STEP.size}")
    step: float = _STEP.unpack_from(payload.data)[0]
    if not (math.isfinite(step) and step >= 0):
        raise PayloadError(f"the lattice step is {step}; it must be finite and not negative")
    rest = payload.data[_STEP.size :]
    points = dither
    if step > 0:
        rows, rest = entropy_coder.decode(rest, np.zeros(len(dither), np.uint8))
        columns, rest = entropy_coder.decode(rest, _contexts(rows))
        points = lattice_points(rows, columns)
    if rest:
        raise PayloadError(f"{len(rest)} bytes follow the end of the payload")
    decoded: NDArray[np.float32] = (step * (points - dither)).astype(np.float32)
    return decoded.reshape(-1)[:count].reshape(payload.shape)


def nearest_points(pairs: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and columns of the lattice points nearest to ``pairs`` of shape (n, 2).

    The lattice is two rectangular ones of cell 1 by sqrt 3, its even rows and its odd rows: round in each,
    take the nearer.
    """
    x, y = pairs[:, 0], pairs[:, 1] / _SQRT3
    even_x, even_y = np.rint(x), np.rint(y)
    odd_x, odd_y = np.floor(x), np.floor(y)
    to_even = (x - even_x) ** 2 + 3 * (y - even_y) ** 2
    to_odd = (x - odd_x - 0.5) ** 2 + 3 * (y - odd_y - 0.5) ** 2
    odd = to_odd < to_even
    rows = np.where(odd, 2 * odd_y + 1, 2 * even_y)
    return rows.astype(np.int64), np.where(odd, odd_x, even_x).astype(np.int64)


def lattice_points(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float64]:
    """Coordinates, of shape (n, 2), of the lattice points with these rows and columns."""
    return np.stack((columns + (rows % 2) / 2, rows * (_SQRT3 / 2)), axis=1)


def _dither(uniforms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Uniform on the Voronoi cell: uniform on a parallelogram of the lattice, less the nearest point."""
    along, across = uniforms[0::2], uniforms[1::2]
    spread = np.stack((along + across / 2, across * (_SQRT3 / 2)), axis=1)
    return spread - lattice_points(*nearest_points(spread))


def _pairs(update: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.pad(update, (0, update.size % 2)).reshape(-1, 2)


def _contexts(rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The column's context: how far out the row is, or from 3 on its parity.

    The parity shifts the columns by a half; the distance matters because large weights come together.
    """
    distance = np.abs(rows)
    return np.where(distance < 3, distance, 3 + rows % 2).astype(np.uint8)


def _step_for(pairs: NDArray[np.float64], dither: NDArray[np.float64], budget_bits: float) -> float:
    """The smallest step whose entropy stays within the budget.

    Halving the step costs one bit a weight where steps are fine, less where they are coarse. So the
    logarithm of the step is sought with the slope of the last two tries, within brackets that halve when the
    slope leads out of them.
    """
    largest = float(np.abs(pairs).max())
    fine, coarse = _FINEST, _COARSEST
    slack = _BITS_TOLERANCE * pairs.size
    slope = float(pairs.size)
    at, cost = coarse, 0.0
    while coarse - fine > _STEP_TOLERANCE:
        tried = at + (cost - (budget_bits - slack / 2)) / slope
        if not fine < tried < coarse:
            tried = (fine + coarse) / 2
        tried_cost = _cost_bits(pairs / (largest * 2.0**tried) + dither)
        if tried_cost <= budget_bits:
            coarse = tried
            if tried_cost >= budget_bits - slack:
                break
        else:
            fine = tried
        if tried_cost < cost or tried_cost > cost:
            slope = min(max(abs((tried_cost - cost) / (tried - at)), pairs.size / 16), float(pairs.size))
        at, cost = tried, tried_cost
    return largest * float(2.0**coarse)


def _cost_bits(points: NDArray[np.float64]) -> float:
    rows, columns = nearest_points(points)
    return entropy_coder.cost_bits(rows, np.zeros(rows.shape, np.uint8)) + entropy_coder.cost_bits(
        columns, _contexts(rows)
    )
