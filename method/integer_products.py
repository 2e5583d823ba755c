"""Scalar products of what boards have changed, on whole numbers: the same on every machine.

A kernel adds them up (`fedmpq_whole_products`), exactly, as two int64, the upper bits and the lower. Units
are multiplied in at the end, one row of the layer after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.changes import Changes, add_whole_products
from fedmpq.method.origins import Origin
from fedmpq.model.quantized import PackedLayer

_AT_ONCE = 1 << 18
"""So many changes are numbers at a time, of all boards together: 2 MB, however many boards there are."""
_FEWEST_COLUMNS, _MOST_COLUMNS = 256, 1 << 14
_LOWER = 26


def scalar_products(origins: Sequence[Origin], returned: Sequence[PackedLayer]) -> NDArray[np.float64]:
    """`<C_n, C_k>` of the changes of one layer by all boards, each with the origin that it was sent."""
    order, groups = _groups(origins, returned)
    units = np.stack([origins[board].unit[:, 0] for board in order])
    size, rows = origins[0].size, units.shape[1]
    total = np.zeros((len(origins), len(origins)))
    for row in range(rows):
        start, stop = size // rows * row, size // rows * (row + 1)
        unit = units[:, row]
        total += _whole_products(groups, start, stop) * np.multiply.outer(unit, unit)
    found = np.empty_like(total)
    found[np.ix_(order, order)] = total
    return found


def _groups(origins: Sequence[Origin], returned: Sequence[PackedLayer]) -> tuple[list[int], list[Changes]]:
    """The changes of boards that were sent and returned the same bit-widths, and which boards these are."""
    alike: dict[tuple[int, int], list[int]] = {}
    for board, (origin, layer) in enumerate(zip(origins, returned, strict=True)):
        origin.check(layer)
        alike.setdefault((origin.bits, layer.bits), []).append(board)
    groups = [origins[boards[0]].changes([returned[one] for one in boards]) for boards in alike.values()]
    return [board for boards in alike.values() for board in boards], groups


def _whole_products(groups: Sequence[Changes], start: int, stop: int) -> NDArray[np.float64]:
    """The products over the weights `start..stop - 1`, in units, rounded once."""
    boards = sum(changes.boards for changes in groups)
    upper, lower = (np.zeros((boards, boards), np.int64) for _ in range(2))
    step = min(max(_AT_ONCE // boards, _FEWEST_COLUMNS), _MOST_COLUMNS)
    room = np.empty(boards * min(step, stop - start))
    for first in range(start, stop, step):
        count = min(step, stop - first)
        columns, row = room[: boards * count].reshape(boards, count), 0
        for changes in groups:
            changes.write(first, count, columns[row : row + changes.boards])
            row += changes.boards
        add_whole_products(columns, upper, lower)
    below: NDArray[np.float64] = np.ldexp(upper.astype(np.float64), _LOWER) + lower
    return below + np.tril(below, -1).T
