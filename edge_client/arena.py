"""Memory for the tensors of a training step, the same from step to step.

Fresh pages from the operating system cost more time than many a kernel that fills them. An arena knows after one step how
much room a step needs at its fullest, and from then on lends parts of one block. What is lent comes back by itself when
nobody refers to it any more.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ALIGNMENT = 64


class Arena:
    """Lends arrays, first fit; not for use by two threads at once."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._needed = 0
        self._lent: dict[int, tuple[int, weakref.ref[memoryview]]] = {}

    def begin_step(self) -> None:
        """Make the block as large as the fullest moment so far; only when nothing is lent."""
        if self._needed > self._block.nbytes and not self._lent:
            self._block = np.empty(0, np.uint8)
            self._block = np.empty(self._needed, np.uint8)

    def take(self, shape: tuple[int, ...] | int, dtype: DTypeLike) -> NDArray[Any]:
        """An array with whatever was in it before; outside the block for what the block has no room for yet."""
        count = math.prod(shape) if isinstance(shape, tuple) else shape
        size = count * np.dtype(dtype).itemsize
        start = self._gap(size)
        self._needed = max(self._needed, start + size)
        block = self._block if start + size <= self._block.nbytes else np.empty(size, np.uint8)
        first = start if block is self._block else 0
        array = np.frombuffer(memoryview(block)[first : first + size], dtype)
        # The array and all views of it share one memoryview: its end is theirs.
        lease: Any = array.base
        self._lent[start] = start + size, weakref.ref(lease, lambda _: self._lent.pop(start, None))
        return array.reshape(shape)

    def _gap(self, size: int) -> int:
        """The lowest place where `size` bytes fit between what is lent."""
        start = 0
        for begin in sorted(self._lent):
            if begin - start >= size:
                break
            start = -(-self._lent[begin][0] // _ALIGNMENT) * _ALIGNMENT
        return start
