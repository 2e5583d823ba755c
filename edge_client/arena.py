"""Memory for the tensors of a training step, the same from step to step.

Fresh pages from the operating system cost more time than many a kernel that fills them. An arena knows after
one step how much room a step needs at its fullest, and from then on lends parts of one block. What is lent
comes back by itself when nobody refers to it any more.
"""

from __future__ import annotations

import math
import mmap
import weakref
from bisect import insort
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ALIGNMENT = 64


class Arena:
    """Lends arrays, first fit; not for use by two threads at once."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._needed = 0
        self._starts: list[int] = []
        """Where what is lent begins, in order."""
        self._ends: dict[int, int] = {}
        self._leases: dict[int, weakref.ref[Any]] = {}

    def begin_step(self) -> None:
        """Make the block as large as the fullest moment so far; only when nothing is lent."""
        if self._needed > self._block.nbytes and not self._starts:
            self._block = np.empty(0, np.uint8)
            self._block = np.empty(self._needed, np.uint8)

    def take(self, shape: tuple[int, ...] | int, dtype: DTypeLike) -> NDArray[Any]:
        """An array with whatever was in it before; outside the block while that has no room for it yet."""
        count = math.prod(shape) if isinstance(shape, tuple) else shape
        size = count * np.dtype(dtype).itemsize
        start = self._gap(size)
        self._needed = max(self._needed, start + size)
        if start + size <= self._block.nbytes:
            array = np.frombuffer(self._block.data, dtype, count, start)
        else:
            # Pages of its own, which go back once free: the heap would keep them beside the block.
            array = np.frombuffer(mmap.mmap(-1, max(1, size)), dtype, count)
        # The array and all views of it share one memoryview: its end is theirs.
        lease: Any = array.base
        insort(self._starts, start)
        self._ends[start] = start + size
        self._leases[start] = weakref.ref(lease, lambda _: self._end(start))
        return array.reshape(shape) if isinstance(shape, tuple) else array

    def _end(self, start: int) -> None:
        self._starts.remove(start)
        del self._ends[start], self._leases[start]

    def _gap(self, size: int) -> int:
        """The lowest place where `size` bytes fit between what is lent."""
        start = 0
        for begin in self._starts:
            if begin - start >= size:
                break
            start = -(-self._ends[begin] // _ALIGNMENT) * _ALIGNMENT
        return start
