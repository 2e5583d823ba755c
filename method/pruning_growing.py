"""Pruning-growing (Alg. 2): deal each layer a bit-width so that a client's model fits its budget.

Every rule here returns widths with ``sum(b_l * m_l) <= v * M``, ``1 <= b_l <= 8``, and no layer able to take
one more bit of those the rule gives at most. The budget is compared exactly: ``floor(v * M)`` is computed
once in rational arithmetic, all else is integer. A float budget stands for its exact binary value; pass a
``Fraction`` where a decimal such as 2.3 is meant to the digit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.grid import FAST_BITS, MAX_BITS

MIN_BITS = 1
EVEN_AT_MOST = 0.9
"""Of greed's error: what an even start must end with to be preferred."""


Error = Callable[[int, int], float]
"""Of a layer, by its index, at so many bits."""


class BudgetError(ValueError):
    """A budget, or a description of the layers, that no assignment of bit-widths can answer."""


def deal_paper(
    bit_widths: Sequence[int], sizes: Sequence[int], growth: Sequence[int], budget: float | Fraction
) -> tuple[int, ...]:
    """Take bits from, then give bits to, layers in the order of ``m_l * (growth_l + 1)``, descending and
    stable.

    ``growth`` is the change of each width over the client's last round, ``b_after - b_before``: zero before
    its first, negative where it pruned. Bits are taken from the first layer until it has 1, then from the
    next, while the average exceeds the budget; then given to the last layer until it has 8, then to the one
    before, down to and including the first. A layer whose next bit would exceed the budget is passed over,
    and the earlier ones are still tried.
    """
    capacity = _capacity(sizes, budget)
    _require_length("bit_widths", len(bit_widths), len(sizes))
    _require_length("growth", len(growth), len(sizes))
    widths = [_checked_width(f"bit_widths[{layer}]", bits) for layer, bits in enumerate(bit_widths)]
    weights = [int(size) for size in sizes]
    order = sorted(range(len(weights)), key=lambda layer: -weights[layer] * (int(growth[layer]) + 1))
    spare = capacity - sum(bits * size for bits, size in zip(widths, weights, strict=True))
    for layer in order:
        while spare < 0 and widths[layer] > MIN_BITS:
            widths[layer] -= 1
            spare += weights[layer]
    # The spare room only shrinks from here on, so what does not fit now never will: one pass is enough.
    for layer in reversed(order):
        taken = min(MAX_BITS - widths[layer], spare // weights[layer])
        widths[layer] += taken
        spare -= taken * weights[layer]
    return tuple(widths)


def deal_best(
    sizes: Sequence[int], errors: NDArray[np.float64] | Error, budget: float | Fraction, floor: int = 2
) -> tuple[int, ...]:
    """Give the next bit where it removes the most error per stored bit, ``(E[b] - E[b+1]) / m_l``, until
    none fits.

    ``errors[l][b - 1]`` is the (weighted) quantization error of layer ``l`` at ``b`` bits. A function of
    ``l`` and ``b`` is asked for those alone that the deal depends on. Every layer starts at ``floor`` bits,
    or at 1 if the budget is below the floor: a hard constraint goes before a preference. Equal gains go to
    the lower layer index. A bit that removes nothing, or by noise adds error, is dealt last, but it is dealt:
    the width is free to use and the next round's errors may need it.

    Greed can spend on small layers what a large one lacks for its next bit. So ``floor(v)`` bits on every
    layer is tried as a start too, and is taken where it ends with a tenth less error.

    No layer gets more than ``FAST_BITS`` bits unless the budget does: beyond, inference runtimes leave their
    fastest kernels, and next to 4-bit activations the weights' error is small already.
    """
    capacity = _capacity(sizes, budget)
    ceiling = FAST_BITS if budget <= FAST_BITS else MAX_BITS
    error = _finite(errors) if callable(errors) else _of_table(errors, len(sizes))
    _checked_width("floor", floor)
    weights = [int(size) for size in sizes]
    least = floor if floor * sum(weights) <= capacity else MIN_BITS
    greedy, even = (
        _grown(start, weights, error, capacity, ceiling) for start in (least, max(least, int(budget)))
    )
    return even if _total(error, even) < EVEN_AT_MOST * _total(error, greedy) else greedy


def _total(error: Error, widths: tuple[int, ...]) -> float:
    return sum(error(layer, bits) for layer, bits in enumerate(widths))


def _grown(start: int, weights: list[int], error: Error, capacity: int, ceiling: int) -> tuple[int, ...]:
    """From `start` bits on every layer, the best bit next, until none fits."""
    widths = [start] * len(weights)
    spare = capacity - start * sum(weights)

    def candidate(layer: int) -> tuple[float, int]:
        bits = widths[layer]
        return (error(layer, bits + 1) - error(layer, bits)) / weights[layer], layer

    heap = [candidate(layer) for layer in range(len(weights)) if widths[layer] < ceiling]
    heapq.heapify(heap)
    while heap:
        _, layer = heapq.heappop(heap)
        if weights[layer] > spare:
            continue
        widths[layer] += 1
        spare -= weights[layer]
        if widths[layer] < ceiling:
            heapq.heappush(heap, candidate(layer))
    return tuple(widths)


def _capacity(sizes: Sequence[int], budget: float | Fraction) -> int:
    """How many bits the model may store: ``floor(v * M)``."""
    if len(sizes) == 0:
        raise BudgetError("sizes is empty; a model needs at least one quantized layer")
    for layer, size in enumerate(sizes):
        if size < 1:
            raise BudgetError(f"sizes[{layer}] is {size}; a layer has at least 1 weight")
    # Written so that NaN fails it too.
    if not MIN_BITS <= budget <= MAX_BITS:
        raise BudgetError(
            f"budget is {budget} bits per weight; it must lie in {MIN_BITS}..{MAX_BITS}: "
            f"raise it to hold one bit per weight, or cap it at {MAX_BITS}"
        )
    return int(Fraction(budget) * sum(int(size) for size in sizes))


def _checked_width(name: str, bits: int) -> int:
    if not MIN_BITS <= bits <= MAX_BITS:
        raise BudgetError(f"{name} is {bits}; a bit-width lies in {MIN_BITS}..{MAX_BITS}")
    return int(bits)


def _of_table(errors: NDArray[np.float64], layers: int) -> Error:
    table = np.asarray(errors, dtype=np.float64)
    if table.shape != (layers, MAX_BITS):
        raise BudgetError(f"errors has shape {table.shape}; {layers} layers need ({layers}, {MAX_BITS})")
    rows: list[list[float]] = table.tolist()
    for layer, column in np.argwhere(~np.isfinite(table)).tolist():
        _require_finite(layer, column + 1, rows[layer][column])
    return lambda layer, bits: rows[layer][bits - 1]


def _finite(error: Error) -> Error:
    def checked(layer: int, bits: int) -> float:
        return _require_finite(layer, bits, error(layer, bits))

    return checked


def _require_finite(layer: int, bits: int, error: float) -> float:
    if not math.isfinite(error):
        raise BudgetError(
            f"errors[{layer}][{bits - 1}] is {error}; the error of layer {layer} at {bits} bits must be "
            "finite: check that layer's weights"
        )
    return error


def _require_length(name: str, length: int, layers: int) -> None:
    if length != layers:
        raise BudgetError(f"{name} has {length} entries but sizes has {layers}; give one per quantized layer")
