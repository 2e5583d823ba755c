"""Kernels bound to their arguments: types and sizes are checked once, the call can be made again and again.

Types are those of the C headers (`prototypes`), with which memory, structures and numbers are compared here.
Arguments that change from call to call are ctypes numbers (`c_float`, `c_uint32`), whose value is read when
the call is made, as is the place of a `Buffer`.
"""

from __future__ import annotations

from ctypes import addressof, c_float, c_uint32, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedmpq.kernels.library import library
from fedmpq.kernels.memory import Buffer, CStruct, Memory, pointer
from fedmpq.kernels.prototypes import PROTOTYPES, Argument

Number = float | c_float


@dataclass(frozen=True)
class Elements:
    """The first `count` elements of an array or a buffer."""

    memory: Memory
    count: int


Given = Elements | CStruct | Number | c_uint32 | None
"""What an argument may be given as; None is the null pointer."""


class Call:
    """The function `name` of the library and its arguments, in the order of the C declaration.

    To call it gives what the function returns.
    """

    __slots__ = ("_kept", "_run", "buffers")

    def __init__(self, name: str, *given: Given) -> None:
        pairs = list(zip(PROTOTYPES[name].arguments, given, strict=True))
        self._run = partial(getattr(library, name), *(_passed(name, *pair) for pair in pairs))
        memory = tuple(memory for each in given for memory in _memory(each))
        self._kept = (*memory, *(each for each in given if isinstance(each, CStruct)))
        self.buffers = tuple(each for each in memory if isinstance(each, Buffer))

    def __call__(self) -> Any:
        return self._run()


class CheckedCall(Call):
    """A call of a function that returns 0 or else why it could not run; that is raised."""

    __slots__ = ()

    def __call__(self) -> None:
        status = self._run()
        if status == -1:
            raise MemoryError(
                "not enough memory for the scratch buffers of a training kernel; use a smaller batch"
            )
        if status != 0:
            raise ValueError(
                "an image is too large for the training kernels' 32-bit sums; use smaller images"
            )


def _passed(name: str, argument: Argument, given: Given) -> Any:
    """What ctypes is handed for an argument: a ctypes value, which it need not convert at every call."""
    if given is None:
        return None
    if isinstance(given, Elements) and argument.element is not None:
        return pointer(given.memory, argument.element, given.count)
    if isinstance(given, CStruct) and isinstance(given, argument.type):
        return c_void_p(addressof(given))
    if isinstance(given, Elements | CStruct) or argument.element or issubclass(argument.type, CStruct):
        declared = argument.element or argument.type.__name__
        raise TypeError(f"{name}: argument {argument.name!r} is declared as {declared}, not as {given!r}")
    return given if isinstance(given, argument.type) else argument.type(given)


def _memory(given: Given) -> tuple[Memory, ...]:
    if isinstance(given, Elements):
        return (given.memory,)
    return tuple(given.memory.values()) if isinstance(given, CStruct) else ()
