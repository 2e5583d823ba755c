"""Pointwise functions and their slopes, the same to the bit on every machine.

Tables of codes are made from them, and boards and server must make the same ones. The exponential, tanh and
the error function of a libm differ from one machine to the next in the last place, so these are computed
here from what IEEE 754 defines to the bit: sums, differences, products, quotients and roundings of float64,
each an operation of NumPy on its own, which never fuses two.

A function is given as `(value, slope)`, both at `x`; at a kink the slope is torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]

# ln 2 in two parts: the first has 32 bits, so that its product with a whole number up to 2^20 is exact.
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10
_INVERSE_LN2 = 1.44269504088896338700
_ROOT_HALF = 0.70710678118654752440
_ROOT_TWO_OVER_PI = 0.79788456080286535588
_TWO_OVER_ROOT_PI = 1.12837916709551257390
_ONE_OVER_ROOT_TWO_PI = 0.39894228040143267794
_TORCH_CUBIC = 0.044715
_INVERSE_FACTORIALS = [1.0]
for _n in range(1, 15):
    _INVERSE_FACTORIALS.append(_INVERSE_FACTORIALS[-1] / _n)
_LARGEST_EXPONENT = 700.0
# erf is within 2^-54 of 1 from here on.
_LARGEST_ERF = 6.0


def exponential(x: Reals) -> Reals:
    """`e^x` to 2 units in the last place, `x` cut at ±700.

    With `n` the whole number next to `x / ln 2`, it is `2^n` times the Taylor series of what is left, at most
    0.35, to the 14th power.
    """
    x = np.minimum(np.maximum(x, -_LARGEST_EXPONENT), _LARGEST_EXPONENT)
    n = np.rint(x * _INVERSE_LN2)
    rest = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = np.full_like(rest, _INVERSE_FACTORIALS[-1])
    for coefficient in reversed(_INVERSE_FACTORIALS[:-1]):
        series = series * rest + coefficient
    # The float64 whose exponent is n: a power of two by its bits.
    power = ((n.astype(np.int64) + 1023) << 52).view(np.float64)
    return series * power


def logarithm(x: Reals) -> Reals:
    """`ln x` of positive normal numbers, to 2 units in the last place away from 1.

    With `x = m 2^n`, `m` between the roots of 1/2 and 2, it is `n ln 2` and the series of
    `2 artanh((m - 1) / (m + 1))`, in which the 13th term is below 2^-64 of the first.
    """
    m, n = np.frexp(x)
    small = m < _ROOT_HALF
    m, whole = np.where(small, 2.0 * m, m), np.where(small, n - 1, n).astype(np.float64)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = np.full_like(s, 1.0 / 25.0)
    for odd in range(23, 0, -2):
        series = series * square + 1.0 / odd
    return whole * _LN2_HIGH + (2.0 * s * series + whole * _LN2_LOW)


def logistic(x: Reals) -> Reals:
    """`1 / (1 + e^-x)`."""
    return 1.0 / (1.0 + exponential(-x))


def hyperbolic_tangent(x: Reals) -> Reals:
    """`(1 - e) / (1 + e)` with `e = e^(-2 |x|)` and the sign of `x`; 2^-52 from the truth at most."""
    e = exponential(-2.0 * np.abs(x))
    return np.copysign((1.0 - e) / (1.0 + e), x)


def error_function(x: Reals) -> Reals:
    """`erf(x) = 2/sqrt(pi) x e^(-x^2) sum over n of (2 x^2)^n / (3 * 5 * ... * (2n+1))`.

    All terms have one sign, so nothing cancels. Behind `16 + 4 x^2` terms, the rest is below 2^-60 of the
    sum.
    """
    x = np.minimum(np.maximum(x, -_LARGEST_ERF), _LARGEST_ERF)
    square = x * x
    total = np.ones_like(x)
    for n in range(16 + int(4.0 * square.max(initial=0.0)), 0, -1):
        total = total * (square * (2.0 / (2 * n + 1))) + 1.0
    series = _TWO_OVER_ROOT_PI * x * exponential(-square) * total
    return np.where(np.abs(x) < _LARGEST_ERF, series, np.copysign(1.0, x))


Pair = tuple[Reals, Reals]


def _sigmoid(x: Reals, _: float) -> Pair:
    y = logistic(x)
    return y, y * (1.0 - y)


def _silu(x: Reals, _: float) -> Pair:
    share = logistic(x)
    return x * share, share * (1.0 + x * (1.0 - share))


def _tanh(x: Reals, _: float) -> Pair:
    y = hyperbolic_tangent(x)
    return y, 1.0 - y * y


def _hardsigmoid(x: Reals, _: float) -> Pair:
    inside = (x > -3.0) & (x < 3.0)
    return np.minimum(np.maximum(x + 3.0, 0.0), 6.0) / 6.0, np.where(inside, 1.0 / 6.0, 0.0)


def _hardswish(x: Reals, _: float) -> Pair:
    slope = np.where(x <= -3.0, 0.0, np.where(x < 3.0, x / 3.0 + 0.5, 1.0))
    return x * np.minimum(np.maximum(x + 3.0, 0.0), 6.0) / 6.0, slope


def _leaky_relu(x: Reals, slope: float) -> Pair:
    return np.where(x > 0.0, x, x * slope), np.where(x > 0.0, 1.0, slope)


def _elu(x: Reals, alpha: float) -> Pair:
    power = exponential(np.minimum(x, 0.0))
    return np.where(x > 0.0, x, alpha * (power - 1.0)), np.where(x > 0.0, 1.0, alpha * power)


def _gelu(x: Reals, _: float) -> Pair:
    share = 0.5 * (1.0 + error_function(x * _ROOT_HALF))
    density = _ONE_OVER_ROOT_TWO_PI * exponential(-0.5 * (x * x))
    return x * share, share + x * density


def _gelu_tanh(x: Reals, _: float) -> Pair:
    square = x * x
    t = hyperbolic_tangent(_ROOT_TWO_OVER_PI * (x + _TORCH_CUBIC * (x * square)))
    inner = _ROOT_TWO_OVER_PI * (1.0 + (3.0 * _TORCH_CUBIC) * square)
    return 0.5 * x * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner


@dataclass(frozen=True)
class Function:
    """One function: how it is computed, and what is known of its values.

    `pair(x, parameter)` is value and slope. `parameter` says what the parameter is called in torch, None if
    there is none. `bound` is the greatest magnitude of a value, 0 for none.
    """

    pair: Callable[[Reals, float], Pair]
    parameter: str | None = None
    bound: float = 0.0
    negative: bool = True
    """Whether it gives values below zero."""


FUNCTIONS: dict[str, Function] = {
    "hardswish": Function(_hardswish),
    "hardsigmoid": Function(_hardsigmoid, bound=1.0, negative=False),
    "silu": Function(_silu),
    "sigmoid": Function(_sigmoid, bound=1.0, negative=False),
    "leaky_relu": Function(_leaky_relu, parameter="negative_slope"),
    "tanh": Function(_tanh, bound=1.0),
    "gelu": Function(_gelu),
    "gelu_tanh": Function(_gelu_tanh),
    "elu": Function(_elu, parameter="alpha"),
}


def evaluated(function: str, parameter: float, x: NDArray[np.floating]) -> Pair:
    """Value and slope of the function at each `x`, in float64."""
    return FUNCTIONS[function].pair(np.asarray(x, np.float64), parameter)
