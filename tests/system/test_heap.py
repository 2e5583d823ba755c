"""Memory that is given back."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedmpq.system.heap import forget_pages

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory from Linux's /proc")
SIZE = 64 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@linux
def test_pages_that_are_forgotten_are_not_resident() -> None:
    block = np.ones(SIZE, np.uint8)
    before = resident()
    forget_pages(block.ctypes.data, block.nbytes)
    assert before - resident() > SIZE * 0.9
    block[...] = 7
    assert int(block.min()) == 7


@linux
@pytest.mark.parametrize(("start", "size"), [(0, 0), (1, 10), (1, mmap.PAGESIZE), (5, 2 * mmap.PAGESIZE)])
def test_what_lies_beside_a_block_is_kept(start: int, size: int) -> None:
    pages = mmap.mmap(-1, 4 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = np.frombuffer(pages, np.uint8)
    block[...] = 7
    forget_pages(block.ctypes.data + start, size)
    lost = np.flatnonzero(block != 7)
    assert np.all((lost >= start) & (lost < start + size))
    assert len(lost) in (0, mmap.PAGESIZE)


@linux
def test_threads_share_a_heap_whose_free_pages_go_back() -> None:
    """In a process of its own: malloc's settings are the process's."""
    script = """
import threading
from pathlib import Path
from fedmpq.system.heap import share_one_heap, trim_heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

share_one_heap()
kept = []
def work():
    held = [bytes(4000) for _ in range(10_000)]
    kept.append(held[-1])
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
before = resident()
trim_heap()
print(before - resident() > 1000)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@linux
def test_what_is_kept_is_not_mapped_again() -> None:
    """In a process of its own: malloc's settings are the process's."""
    script = """
import resource
import sys
import numpy as np
from fedmpq.system.heap import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        np.zeros(64 << 20, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if sys.argv[1:]:
    keep_freed_memory()
faults()
print(faults())
"""

    def faults(*kept: str) -> int:
        command = [sys.executable, "-c", script, *kept]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    assert faults("kept") < faults() / 4
