"""Whether two cores share a cache, by how long a cache line takes from one to the other and back.

On a virtual machine that changes from one minute to the next: its cores are moved. Cores of one part of a
server's chip need some 50 ns, those of two parts some 300 ns. Two threads on such cores wait for each other's
memory, so figures of several threads say which it was.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.memory import ROOT

SOURCE = Path(__file__).with_suffix(".cpp")
PROGRAM = ROOT / "build" / "core_distance"
NEAR_NS = 150.0


class NoCompiler(RuntimeError):
    """Nothing here compiles C++."""


def nanoseconds() -> float:
    """There and back, now; compiles its program the first time."""
    if not PROGRAM.exists() or PROGRAM.stat().st_mtime < SOURCE.stat().st_mtime:
        compiler = next(filter(shutil.which, ("c++", "g++", "clang++")), None)
        if compiler is None:
            raise NoCompiler("no C++ compiler found: install one, e.g. g++")
        PROGRAM.parent.mkdir(exist_ok=True)
        subprocess.run([compiler, "-O2", "-pthread", str(SOURCE), "-o", str(PROGRAM)], check=True)
    done = subprocess.run([str(PROGRAM)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def near(distance: float) -> bool:
    """Whether cores that far apart share a cache."""
    return distance < NEAR_NS
