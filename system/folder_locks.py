"""One process to a folder: a lock on the folder itself, which the system takes back when it ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FolderTaken(Exception):
    """Another process works in the folder."""


def lock_folder(folder: Path) -> int:
    """The descriptor that holds the lock until it is closed; raises FolderTaken where another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise FolderTaken(f"another process works in {folder}") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """The lock, for as long as the block takes."""
    descriptor = lock_folder(folder)
    try:
        yield
    finally:
        os.close(descriptor)
