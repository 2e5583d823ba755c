"""The integer update: a layer's codes move by whole steps, the step size stays put during local training.

`d` is the (momentum-filtered) gradient with respect to the real weight `W = step * (code - z)`, `eta` the
learning rate, `u` uniform in [0, 1).

**paper** (Eq. 5-10). With `k = round(log2(eta * step * |d|))` and `q_i = k + 2i - 1` for `i = 1..b`, the move
in codes is `sum_{1 <= q_i <= b} 2^(q_i - 1) + [u < sum_{q_i <= 0} 2^(q_i - 1)]`, or `2^b - 1` if `q_b > b`.
In expectation this is SGD with the rate `eta * step^2 * (4^b - 1)/3`.

There, Group Lasso over the magnitude planes `P_i` moves a weight of magnitude `k` towards zero, never past
it, by `eta * F(k)` codes, `F(k) = lambda * (m_l/M) * sum_i 2^i * bit_i(k) / ||P_i||_2`, stochastically
rounded as a step of its own.

**carried**. A weight lies at `256 code + fraction`, the fraction in -128..127, and the code is the nearest
one. It moves by `floor(256 eta_eff d / step + u)`. What a step does not move the code by is not lost: a rule
that rounds to whole codes at every step is a random walk, of which the noise grows with the number of steps.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedmpq import kernels
from fedmpq.exchange.change import FRACTIONS, Fractions
from fedmpq.model.grid import code_range
from fedmpq.model.pruning import magnitudes

Codes = NDArray[np.uint8]
Flat = NDArray[np.float32]

# log2(eta * step * |d|) up to this moves nothing: the chance would be under 2^-49, and uniforms end at 2^-24.
_LEAST_EXPONENT = -64
# Above every finite float32's: saturates at any bit-width.
_INFINITE_EXPONENT = 129
# The least float32 above sqrt(1/2); the float32 nearest to it lies below, where log2 still rounds down.
_SQRT_HALF = np.float32(0.70710683)


def paper_update(codes: Codes, direction: Flat, rate: Flat, bits: int, uniforms: Flat) -> Codes:
    """The paper's move against `direction` (no NaN); `rate` is `eta * step`, a scalar or one per weight."""
    moves, chances = _paper_tables(bits)
    with np.errstate(over="ignore"):
        exponents = _rounded_log2(np.abs(direction) * rate)
    index = np.clip(exponents - _LEAST_EXPONENT, 0, len(moves) - 1)
    steps = moves[index] + (uniforms < chances[index])
    return _moved(codes, np.where(direction > 0, steps, -steps), bits)


def carried_update(
    codes: Codes, fractions: Fractions, move: Flat, bits: int, uniforms: Flat
) -> tuple[Codes, Fractions]:
    """`256 code + fraction - floor(256 move + u)`, clipped; `move = eta_eff * d / step` has no NaN."""
    low, high = code_range(bits)
    limit = np.float32(FRACTIONS << bits)
    with np.errstate(over="ignore"):
        steps = np.floor(np.clip(move * np.float32(FRACTIONS), -limit, limit) + uniforms).astype(np.int32)
    at = codes.astype(np.int32) * FRACTIONS + fractions - steps + FRACTIONS // 2
    at = np.clip(at, low * FRACTIONS, (high + 1) * FRACTIONS - 1)
    return (at // FRACTIONS).astype(np.uint8), (at % FRACTIONS - FRACTIONS // 2).astype(np.int8)


def lasso_update(codes: Codes, pull: Flat, bits: int, uniforms: Flat) -> Codes:
    """Move every code towards zero by `floor(pull[magnitude] + u)`, never past it."""
    size = magnitudes(codes, bits)
    # float32 may round `k + u` up to `k + 1`.
    steps = np.minimum(np.floor(pull[size] + uniforms), size).astype(np.int32)
    return _moved(codes, np.where(_positive(codes, bits), steps, -steps), bits)


def lasso_pull(codes: Codes, bits: int, strength: float) -> Flat:
    """`min(k, strength * sum_i 2^i * bit_i(k) / ||P_i||_2)` for every magnitude `k`.

    `strength = eta * lambda * m_l/M`; an empty plane pulls nothing.
    """
    sizes = np.arange(1 << (bits - 1))
    pull = np.zeros(len(sizes), np.float64)
    counts = kernels.magnitude_counts(codes, bits) if bits > 1 else ()
    for plane, count in enumerate(counts):
        if count:
            pull += (sizes >> plane & 1) * (strength * 2.0**plane / np.sqrt(np.float64(count)))
    return np.minimum(pull, sizes).astype(np.float32)


def _rounded_log2(values: Flat) -> NDArray[np.int32]:
    """`round(log2 x)` from the float's exponent and mantissa, the same everywhere; zero gives the least."""
    mantissa, exponent = np.frexp(values)
    rounded = exponent - (mantissa < _SQRT_HALF)
    # What frexp says of infinity differs between C libraries.
    rounded = np.where(np.isinf(values), _INFINITE_EXPONENT, rounded)
    return np.where(values > 0, rounded, _LEAST_EXPONENT).astype(np.int32)


@lru_cache(maxsize=8)
def _paper_tables(bits: int) -> tuple[NDArray[np.int32], Flat]:
    """Whole move and chance of one more, for each `k` from the least up to saturation."""
    moves, chances = [0], [0.0]
    for k in range(_LEAST_EXPONENT + 1, 2 - bits):
        exponents = [k + 2 * i - 1 for i in range(1, bits + 1)]
        moves.append(sum(2 ** (q - 1) for q in exponents if 1 <= q <= bits))
        chances.append(sum(2.0 ** (q - 1) for q in exponents if q <= 0))
    moves.append(2**bits - 1)
    chances.append(0.0)
    return np.array(moves, np.int32), np.array(chances, np.float32)


def _positive(codes: Codes, bits: int) -> NDArray[np.bool_]:
    return codes >= (1 << (bits - 1))


def _moved(codes: Codes, steps: NDArray[np.int32], bits: int) -> Codes:
    low, high = code_range(bits)
    moved: Codes = np.clip(codes.astype(np.int32) - steps, low, high).astype(np.uint8)
    return moved
