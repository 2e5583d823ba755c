"""Scalar products of what boards have changed, on whole numbers: the same on every machine.

A matrix product of float64 is exact, whatever order a library adds in, as long as every sum is a whole
number below 2^53. So columns are taken as many at a time as the largest change allows, and their products are
added as two int64, the upper bits and the lower. Units are multiplied in at the end, one row of the layer
after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.changes import Changes
from fedmpq.method.origins import Origin
from fedmpq.model.quantized import PackedLayer

_COLUMNS = 1 << 14
_EXACT = 1 << 53
_LOWER = 26


def scalar_products(origins: Sequence[Origin], returned: Sequence[PackedLayer]) -> NDArray[np.float64]:
    """`<C_n, C_k>` of the changes of one layer by all boards, each with the origin that it was sent."""
    groups = _groups(origins, returned)
    units = np.stack([np.broadcast_to(origin.unit[:, 0], max(1, origin.step.size)) for origin in origins])
    size, rows = origins[0].places.size, units.shape[1]
    total = np.zeros((len(origins), len(origins)))
    for row in range(rows):
        start, stop = size // rows * row, size // rows * (row + 1)
        unit = units[:, row]
        total += _whole_products(groups, len(origins), start, stop) * np.multiply.outer(unit, unit)
    return total


def _groups(origins: Sequence[Origin], returned: Sequence[PackedLayer]) -> list[tuple[list[int], Changes]]:
    """Boards that were sent and returned the same bit-widths, and their changes."""
    alike: dict[tuple[int, int], list[int]] = {}
    for board, (origin, layer) in enumerate(zip(origins, returned, strict=True)):
        origin.check(layer)
        alike.setdefault((origin.bits, layer.bits), []).append(board)
    return [
        (boards, origins[boards[0]].changes([returned[board] for board in boards]))
        for boards in alike.values()
    ]


def _whole_products(
    groups: Sequence[tuple[list[int], Changes]], boards: int, start: int, stop: int
) -> NDArray[np.float64]:
    """The products over the weights `start..stop - 1`, in units, rounded once."""
    upper, lower = (np.zeros((boards, boards), np.int64) for _ in range(2))
    for first in range(start, stop, _COLUMNS):
        count = min(_COLUMNS, stop - first)
        columns = np.empty((boards, count))
        for members, changes in groups:
            columns[members] = changes.of(first, count)
        greatest = int(np.abs(columns).max(initial=1))
        together = max(1, _EXACT // greatest**2)
        for place in range(0, count, together):
            part = columns[:, place : place + together]
            whole = (part @ part.T).astype(np.int64)
            upper += whole >> _LOWER
            lower += whole & ((1 << _LOWER) - 1)
    found: NDArray[np.float64] = np.ldexp(upper.astype(np.float64), _LOWER) + lower
    return found
