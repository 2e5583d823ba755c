"""What a checkup has found: each thing that was looked at, how it is, and what to do about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedmpq.system.free_disk import free_bytes

State = Literal["good", "warning", "fault"]
DAY = 86400.0
SOON = 14 * DAY
"""A certificate that ends before that is to be renewed."""


@dataclass(frozen=True)
class Finding:
    """`words` say how it is, `fix` what to do; what is good needs no fix."""

    what: str
    state: State
    words: str
    fix: str = ""


def good(what: str, words: str) -> Finding:
    return Finding(what, "good", words)


def warning(what: str, words: str, fix: str) -> Finding:
    return Finding(what, "warning", words, fix)


def fault(what: str, words: str, fix: str) -> Finding:
    return Finding(what, "fault", words, fix)


def clock(now: float, known: Path) -> Finding:
    """A clock that stands before this installation was made is wrong, and certificates seem not to
    be good yet."""
    made = known.stat().st_mtime
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < made - DAY:
        return fault(
            "clock", f"it says {shown}, before this was installed", "set it: timedatectl set-ntp true"
        )
    return good("clock", shown)


def certificate(what: str, begins: float, ends: float, now: float, renewal: str) -> Finding:
    """Whether it is good now, and for how much longer."""
    last = time.strftime("%Y-%m-%d", time.gmtime(ends))
    if now < begins:
        return fault(
            what, "it is not good yet by this machine's clock", "set the clock: timedatectl set-ntp true"
        )
    if now >= ends:
        return fault(what, f"it ended on {last}", renewal)
    if ends - now < SOON:
        return warning(what, f"it ends on {last}", renewal)
    return good(what, f"good until {last}")


def nearest(folder: Path) -> Path:
    """The folder itself, or the first above it that is there."""
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


def disk(folder: Path, least: int, wanted: int) -> Finding:
    """Free space where the folder is, or will be made."""
    there = nearest(folder)
    free = free_bytes(there)
    words = f"{free / 1e9:.1f} GB free at {there}"
    if free < least:
        return fault("disk", words, f"free {(least - free) / 1e6:.0f} MB at least")
    if free < wanted:
        return warning("disk", words, f"free {(wanted - free) / 1e6:.0f} MB to be on the safe side")
    return good("disk", words)


def examined(what: str, look: Callable[[], Iterator[Finding]], fix: str) -> Iterator[Finding]:
    """What `look` finds; an error of this package or of a file is a fault itself."""
    try:
        yield from look()
    except (OSError, ValueError, RuntimeError) as error:
        yield fault(what, " ".join(str(error).split()), fix)
