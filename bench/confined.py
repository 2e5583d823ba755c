"""Processes confined to a share of a core each, by cgroups, to compare several of them on a small machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_MICROSECONDS = 20_000
"""Short, so that a process which has used its share waits for the next one no longer than this."""
_V1, _V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
_LEAVING_SECONDS = 5.0


class CannotConfine(RuntimeError):
    """Why this machine does not let us."""


@contextmanager
def confined(name: str, pid: int, cores: float) -> Iterator[None]:
    """The process, all its threads and what it starts from now on have so many cores together."""
    root = _V1 if _V1.is_dir() else _V2
    group = root / f"fedmpq-bench-{os.getpid()}-{name}"
    try:
        group.mkdir()
        _limit(group, cores)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        message = f"no cgroup with a limit can be made in {root} ({error}); be root, or leave out --cores"
        raise CannotConfine(message) from None
    try:
        yield
    finally:
        _leave(group)


def _limit(group: Path, cores: float) -> None:
    quota = max(1000, round(cores * PERIOD_MICROSECONDS))
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        return
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
    (group / "cpu.cfs_quota_us").write_text(str(quota))


def _leave(group: Path) -> None:
    """Its processes go back to where they were from; a group with processes cannot be removed."""
    end = time.monotonic() + _LEAVING_SECONDS
    while True:
        for pid in (group / "cgroup.procs").read_text().split():
            try:
                (group.parent / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
        else:
            return
