"""Marks that instruction_counter.c sees: HINT #64 before what is counted, HINT #65 after. They do nothing."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable

BEFORE, AFTER = 64, 65
_HINT, _RETURN = 0xD503201F, 0xD65F03C0
_kept: list[mmap.mmap] = []


def marker(number: int) -> Callable[[], None]:
    """A function of two instructions: HINT #number, and back."""
    executable = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=executable)
    code.write((_HINT | number << 5).to_bytes(4, "little") + _RETURN.to_bytes(4, "little"))
    function = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    _kept.append(code)
    return function
