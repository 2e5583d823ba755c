"""The memory that kernels read and write, and the structures of the C interface that point into it.

Nothing of another type than the C declaration's, too small or strided ever reaches the library: `pointer` and
`CStruct.point` refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, c_void_p
from typing import Any, ClassVar

import numpy as np
from numpy.typing import DTypeLike, NDArray


class Buffer:
    """`count` elements of `dtype` that lie wherever `put` says, also after a call was bound to them."""

    def __init__(self, count: int, dtype: DTypeLike) -> None:
        self.count = count
        self.dtype = np.dtype(dtype)
        self.pointer = c_void_p()
        self._fields: list[c_void_p] = []

    def show_in(self, field: c_void_p) -> None:
        """Keep the address in `field`, part of a structure's memory, wherever the elements are put."""
        field.value = self.pointer.value
        self._fields.append(field)

    def put(self, array: NDArray[Any]) -> None:
        """From now on calls find their elements in `array`, which the buffer keeps."""
        self._move(address(array, self.dtype, self.count))
        self.array = array

    def drop(self) -> None:
        """Let go of the array; nothing may be called until the next one is put."""
        self._move(None)
        del self.array

    def _move(self, where: int | None) -> None:
        self.pointer.value = where
        for field in self._fields:
            field.value = where


Memory = NDArray[Any] | Buffer


class CStruct(Structure):
    """A structure of the C interface; pointers in it are set by `point` alone."""

    elements: ClassVar[dict[str, str]]
    """The element type of every field that is a pointer to numbers."""
    memory: Mapping[str, Memory] = {}
    """By field, what its pointers point into, kept as long as the structure."""

    def point(self, field: str, memory: Memory, count: int) -> None:
        """Make `field` point at `memory`, which must hold at least `count` elements of the field's type."""
        where = pointer(memory, self.elements[field], count)
        if isinstance(memory, Buffer):
            memory.show_in(c_void_p.from_buffer(self, getattr(type(self), field).offset))
        else:
            setattr(self, field, where)
        self.memory = {**self.memory, field: memory}


def pointer(memory: Memory, dtype: DTypeLike, count: int) -> c_void_p:
    """What a call is given for `memory`: at least `count` elements of `dtype`."""
    if not isinstance(memory, Buffer):
        return c_void_p(address(memory, dtype, count))
    if memory.dtype != dtype or memory.count < count:
        raise _misfit(memory.count, memory.dtype, count, dtype)
    return memory.pointer


def address(array: NDArray[Any], dtype: DTypeLike, count: int) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous or array.size < count:
        raise _misfit(array.size, array.dtype, count, dtype)
    # Several times faster than array.ctypes.
    found: int = array.__array_interface__["data"][0]
    return found


def _misfit(size: int, dtype: DTypeLike, due: int, due_dtype: DTypeLike) -> ValueError:
    return ValueError(f"a buffer of {size} {dtype} where {due} contiguous {np.dtype(due_dtype)} are due")
