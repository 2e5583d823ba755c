"""A disk that is full: how to know it, and how to wait until it is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.connection import pause

SPARE_BYTES = 256 << 10
"""For the small files of the state folder."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether a file could not be written because the disk, or this user's share of it, is full."""
    return isinstance(error, OSError) and error.errno in _FULL


def full_words(folder: Path, needed: int) -> str:
    """What the log and the operator are told."""
    return f"no space is left in {folder}: free {(needed + SPARE_BYTES) / 1e6:.1f} MB there"


async def until_there_is_space(folder: Path, needed: int, retry: Backoff) -> None:
    """Until so many bytes and some small files can be written to the folder."""
    while not has_space(folder, needed):
        await pause(retry, full_words(folder, needed))


def has_space(folder: Path, needed: int) -> bool:
    """Tried out, because the numbers that a file system gives do not know of quotas."""
    probe = folder / ".space"
    try:
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, needed + SPARE_BYTES)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True
