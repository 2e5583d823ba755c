"""How much memory this process may take: what its operator gives, or a share of what the machine has free.

It is asked before something large is allocated, so that what does not fit is refused in words. It is no
limit of the operating system.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from fedmpq.system.machine import physical_memory

SHARE = 0.8
"""Of the memory that is free when the process starts, unless its operator says otherwise."""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")

_given: int | None = None


def memory_given() -> int:
    """Bytes that this process may take in all."""
    return round(SHARE * available_memory()) if _given is None else _given


def give_memory(most: int | None) -> None:
    """From now on this process may take so many bytes; None for the default share."""
    global _given
    _given = most


def available_memory() -> int:
    """Bytes that can be had without swapping; a container may allow fewer than the machine has."""
    found = physical_memory()
    with suppress(OSError, ValueError, IndexError):
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        found = 1024 * int(line.split()[1])
    with suppress(OSError, ValueError):
        allowed = int((_CGROUP / "memory.max").read_text())
        found = min(found, max(0, allowed - int((_CGROUP / "memory.current").read_text())))
    return found


def parse_size(text: str) -> int:
    """The bytes of "800M", "2 GiB" or "50%" of what is available; ValueError for anything else."""
    if text.endswith("%"):
        share = float(text[:-1])
        if not 0 < share <= 100:
            raise ValueError(f"{text!r} is no share of the memory; give a percentage above 0, at most 100%")
        return round(available_memory() * share / 100)
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ValueError(f"{text!r} is no amount of memory; give it as 800M, 2G or 50%")
    return round(float(match[1]) * _UNITS[match[2].upper()])


def size_text(count: int) -> str:
    """For messages: "5.9 GiB"."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit[0]]
        if count >= factor:
            return f"{count / factor:.3g} {unit}" if count < 1000 * factor else f"{count // factor} {unit}"
    return f"{count} bytes"
