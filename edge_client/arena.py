"""Memory for the tensors of a training step, the same from step to step.

Fresh pages from the operating system cost more time than many a kernel that fills them. So the buffers of a
step lie in one block. A step is a sequence of moments, each a call; a buffer lives from the first moment that
uses it to the last, and buffers whose lives do not meet may share their place.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedmpq.kernels.tensors import Buffer

_ALIGNMENT = 64


@dataclass
class _Life:
    """The first and the last moment of use."""

    first: int = -1
    last: int = -1

    def meets(self, other: _Life) -> bool:
        return self.first <= other.last and other.first <= self.last


class StepBuffer(Buffer):
    """A buffer of a `Layout`; `start` is where in the block it lies."""

    def __init__(self, count: int, dtype: DTypeLike, life: _Life | None = None) -> None:
        super().__init__(count, dtype)
        self.life = life or _Life()
        self.size = -(-max(1, count * self.dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT
        self.start = 0
        self._parts: list[StepBuffer] = []

    @property
    def end(self) -> int:
        return self.start + self.size

    def split(self, number: int) -> list[StepBuffer]:
        """So many equal parts, one behind the other; what uses a part uses the whole."""
        self._parts = [StepBuffer(self.count // number, self.dtype, self.life) for _ in range(number)]
        return self._parts

    def put(self, array: NDArray[Any]) -> None:
        super().put(array)
        for number, part in enumerate(self._parts):
            part.put(array[number * part.count : (number + 1) * part.count])


class Layout:
    """The buffers of one kind of step: used in the order of its calls, then placed, then put into a block."""

    def __init__(self) -> None:
        self._buffers: list[StepBuffer] = []
        self._moment = 0

    def buffer(self, count: int, dtype: DTypeLike) -> StepBuffer:
        self._buffers.append(StepBuffer(count, dtype))
        return self._buffers[-1]

    def use(self, *buffers: Buffer) -> None:
        """The step's next moment, which reads or writes these; buffers from elsewhere do not matter."""
        for buffer in buffers:
            if isinstance(buffer, StepBuffer):
                buffer.life.last = self._moment
                if buffer.life.first < 0:
                    buffer.life.first = self._moment
        self._moment += 1

    def place(self) -> int:
        """Choose the places, the largest buffer first, each as low as it fits; the bytes needed in all."""
        placed: list[StepBuffer] = []
        for buffer in sorted(self._buffers, key=lambda each: each.size, reverse=True):
            for other in placed:  # in the order of their places
                if other.life.meets(buffer.life) and other.end > buffer.start:
                    if other.start >= buffer.end:
                        break
                    buffer.start = other.end
            insort(placed, buffer, key=lambda each: each.start)
        return max((buffer.end for buffer in placed), default=0)

    def put_into(self, block: NDArray[np.uint8]) -> None:
        """Give every buffer its array, with whatever is in it."""
        for buffer in self._buffers:
            buffer.put(np.frombuffer(block.data, buffer.dtype, buffer.count, buffer.start))


class Arena:
    """The block that layouts share: one step is over when the next begins."""

    def __init__(self) -> None:
        self.block = np.empty(0, np.uint8)

    def grow(self, size: int) -> None:
        """A block of at least so many bytes; layouts that were put into a smaller one must be put anew."""
        if size > self.block.nbytes:
            # The old one first: both at once would be the most memory that training ever takes.
            self.block = np.empty(0, np.uint8)
            self.block = np.empty(size, np.uint8)
