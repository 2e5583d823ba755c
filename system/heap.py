"""Memory that this process has and does not use: given back to the operating system, or kept.

Boards do one thing after the other, training and then a calibration: what the first has left must not lie
under the second. Research with whole tensors in full precision wants the opposite. What the C library does
not offer is passed over: it costs memory or time, no result.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

_ARENA_MAX = -8
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""`M_ARENA_MAX`, `M_TRIM_THRESHOLD` and `M_MMAP_MAX` of glibc's malloc.h."""
_GREATEST = 2**31 - 1


def share_one_heap() -> None:
    """Have all threads to come allocate from one heap: each that gets its own keeps some megabytes of it."""
    if (mallopt := getattr(_library(), "mallopt", None)) is not None:
        mallopt(_ARENA_MAX, 1)


def trim_heap() -> None:
    """Give back the pages of what was freed."""
    if (trim := getattr(_library(), "malloc_trim", None)) is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Have large blocks come from the heap and stay there when they are freed: a page that was given back has
    to be mapped and cleared again when the next tensor of that size wants it."""
    if (mallopt := getattr(_library(), "mallopt", None)) is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, _GREATEST)


def forget_pages(address: int, size: int) -> None:
    """Give back the whole pages of a block whose contents are needed no more. They read as anything, until
    they are written again."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0 and hasattr(mmap, "MADV_DONTNEED"):
        madvise = _library().madvise
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(whole), mmap.MADV_DONTNEED)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)
