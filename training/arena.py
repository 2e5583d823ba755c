"""Memory for the tensors of a training step, the same from step to step.

Fresh pages from the operating system cost more time than many a kernel that fills them. So the buffers of a
step lie in one block. A step is a sequence of moments, each a call; a buffer lives from the first moment that
uses it to the last, and buffers whose lives do not meet may share their place.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedmpq.kernels.memory import Buffer
from fedmpq.system.heap import forget_pages
from fedmpq.training.native_plan import LITTLE, with_spare

_ALIGNMENT = 64
_KEPT = 8
"""Layouts whose places are remembered: of the batch sizes of one model, with and without spare buffers."""


@dataclass
class _Life:
    """The first and the last moment of use."""

    first: int = -1
    last: int = -1

    @property
    def moments(self) -> slice:
        return slice(max(0, self.first), self.last + 1)


class StepBuffer(Buffer):
    """A buffer of a `Layout`; `start` is where in the block it lies, if it is `placed` there."""

    def __init__(self, count: int, dtype: DTypeLike, life: _Life | None = None) -> None:
        super().__init__(count, dtype)
        self.life = life or _Life()
        self.size = -(-max(1, count * self.dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT
        self.start, self.placed = 0, True
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
        self._spare: list[StepBuffer] = []
        self._moment = 0

    def buffer(self, count: int, dtype: DTypeLike) -> StepBuffer:
        self._buffers.append(StepBuffer(count, dtype))
        return self._buffers[-1]

    def spare_buffer(self, count: int, dtype: DTypeLike) -> StepBuffer:
        """One that the step could do without: it is to be touched only if it is `placed`."""
        self._spare.append(StepBuffer(count, dtype))
        return self._spare[-1]

    def use(self, *buffers: Buffer) -> None:
        """The step's next moment, which reads or writes these; buffers from elsewhere do not matter."""
        for buffer in buffers:
            if isinstance(buffer, StepBuffer):
                buffer.life.last = self._moment
                if buffer.life.first < 0:
                    buffer.life.first = self._moment
        self._moment += 1

    def place(self, all_spare: bool = False, little: int = LITTLE) -> int:
        """Choose the places; the bytes needed in all.

        Spare buffers get one, either all of them or as long as the step needs no more than a sixth of room on
        top for them, or so little, the last ones first: those live the shortest.
        """
        if all_spare:
            return _place([*self._buffers, *self._spare])
        spare, most = self._affordable(little)
        needed = _place([*self._buffers, *spare])
        while spare and needed > most:  # there were gaps between buffers
            spare = spare[: len(spare) * 7 // 8]
            needed = _place([*self._buffers, *spare])
        for buffer in self._spare:
            buffer.placed = buffer in spare
        return needed

    def _affordable(self, little: int) -> tuple[list[StepBuffer], int]:
        """Spare buffers whose room could be had, and how many bytes are the most then."""
        live = np.zeros(self._moment, np.int64)  # bytes in use at each moment
        for buffer in self._buffers:
            live[buffer.life.moments] += buffer.size
        most = with_spare(int(live.max(initial=0)), little)
        chosen = []
        for buffer in reversed(self._spare):
            during = live[buffer.life.moments]
            if during.size and during.max() + buffer.size <= most:
                during += buffer.size
                chosen.append(buffer)
        return chosen, most

    def put_into(self, block: NDArray[np.uint8]) -> None:
        """Give every buffer its array, with whatever is in it."""
        for buffer in (*self._buffers, *(spare for spare in self._spare if spare.placed)):
            buffer.put(np.frombuffer(block.data, buffer.dtype, buffer.count, buffer.start))


def _place(buffers: list[StepBuffer]) -> int:
    """Give each its place; where the last of them ends."""
    starts = _starts(tuple((buffer.size, buffer.life.first, buffer.life.last) for buffer in buffers))
    for buffer, start in zip(buffers, starts, strict=True):
        buffer.start = start
    return max((buffer.end for buffer in buffers), default=0)


@lru_cache(_KEPT)
def _starts(sizes_and_lives: tuple[tuple[int, int, int], ...]) -> tuple[int, ...]:
    """The largest first, each as low as it fits. Buffers are given by size, first and last moment; who trains
    one client after the other asks for the same again and again."""
    starts = [0] * len(sizes_and_lives)
    placed: list[tuple[int, int, int, int]] = []  # start, end, first and last moment, in the order of starts
    for number in sorted(range(len(starts)), key=lambda each: sizes_and_lives[each][0], reverse=True):
        size, first, last = sizes_and_lives[number]
        start = 0
        for other_start, other_end, other_first, other_last in placed:
            if other_first <= last and first <= other_last and other_end > start:
                if other_start >= start + size:
                    break
                start = other_end
        insort(placed, (start, start + size, first, last), key=lambda each: each[0])
        starts[number] = start
    return tuple(starts)


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

    def rest(self) -> None:
        """Give the block's memory back until the next step writes to it; its place stays the same."""
        forget_pages(self.block.ctypes.data, self.block.nbytes)
