"""What the machine has to compute with."""

from __future__ import annotations

import os


def available_cores() -> int:
    """The cores this process may use; `taskset` or a container may allow fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def physical_memory() -> int:
    """Bytes of main memory, whoever uses them."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
