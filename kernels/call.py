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


class KernelError(ValueError):
    """Arguments that a kernel refuses; the message names the kernel, what it was given and the fix."""


_REFUSED = {
    -2: "sums of so many products might not fit 32 bits: use smaller images, kernels or fewer channels",
    -4: "a size, shape, code or label is outside what it takes (fedmpq/training.h states the limits)",
}


class Call:
    """The function `name` of the library and its arguments, in the order of the C declaration.

    To call it gives what the function returns.
    """

    __slots__ = ("_given", "_kept", "_run", "buffers", "name", "subject", "values")

    def __init__(self, name: str, *given: Given) -> None:
        self.name, self._given = name, given
        pairs = list(zip(PROTOTYPES[name].arguments, given, strict=True))
        self.values = tuple(_passed(name, *pair) for pair in pairs)
        """The arguments as ctypes has them, whose memory holds what the function is called with."""
        self.subject = ""
        """What is not finite if the function meets such a number, in the words of whoever bound the call."""
        self._run = partial(getattr(library, name), *self.values)
        memory = tuple(memory for each in given for memory in _memory(each))
        self._kept = (*memory, *(each for each in given if isinstance(each, CStruct)))
        self.buffers = tuple(each for each in memory if isinstance(each, Buffer))

    def __call__(self) -> Any:
        return self._run()

    def refusal(self, status: int) -> Exception:
        """What a status below 0 means."""
        if status == -1:
            return MemoryError(
                f"not enough memory for the scratch buffers of {self.name}; use a smaller batch"
            )
        if status == -3:
            subject = f"{self.subject} is" if self.subject else f"{self.name} met a number that is"
            return FloatingPointError(f"{subject} not finite")
        reason = _REFUSED.get(status, f"status {status}")
        shown = ", ".join(_shown(each) for each in self._given)
        return KernelError(f"{self.name}({shown}) refuses its arguments: {reason}")


class CheckedCall(Call):
    """A call of a function that returns a number, or, below 0, why it could not run; that is raised."""

    __slots__ = ()

    def __call__(self) -> Any:
        status = self._run()
        if status < 0:
            raise self.refusal(int(status))
        return status


def _shown(given: Given) -> str:
    """An argument in an error message: numbers as they are, of memory its length."""
    if isinstance(given, Elements):
        return f"{given.count} elements"
    if isinstance(given, CStruct):
        numbers = (field[0] for field in given._fields_ if field[0] not in given.elements)
        return f"{{{', '.join(f'{name}={getattr(given, name)}' for name in numbers)}}}"
    return str(given.value if isinstance(given, c_float | c_uint32) else given)


def _passed(name: str, argument: Argument, given: Given) -> Any:
    """What ctypes is handed for an argument: a ctypes value, which it need not convert at every call."""
    if given is None:
        return c_void_p()
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
