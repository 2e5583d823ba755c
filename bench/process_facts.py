"""What Linux says of a process that runs: its CPU time and its memory."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessFacts:
    cpu_seconds: float
    """User and system time of all its threads, those that have ended included; in steps of 1/100 s."""
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> ProcessFacts:
        fields = _after_name(pid)
        # Fields 14, 15 and 24 of proc(5); the list begins with the third.
        cpu = (int(fields[11]) + int(fields[12])) / _TICKS
        return cls(cpu, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))

    @classmethod
    def of_family(cls, pid: int) -> ProcessFacts:
        """Of the process, of the children it has and of those that have ended."""
        fields = _after_name(pid)
        facts = [cls.of(pid)]
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            # One that has just ended is among those that have.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                facts.append(cls.of(int(child)))
        ended = (int(fields[13]) + int(fields[14])) / _TICKS
        return cls(ended + sum(one.cpu_seconds for one in facts), sum(one.resident_bytes for one in facts))


def marked_cpu_seconds(mark: str) -> float:
    """Of all processes that have this in their environment, whoever their parents are; those that have ended
    are not counted."""
    found = 0.0
    for folder in Path("/proc").glob("[0-9]*"):
        # Others' environments cannot be read, and a process may end at any moment.
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found += ProcessFacts.of(int(folder.name)).cpu_seconds
    return found


def parent_of(pid: int) -> int:
    return int(_after_name(pid)[1])


def _after_name(pid: int) -> list[str]:
    """The name may hold spaces and brackets; what follows the last bracket is numbers."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
