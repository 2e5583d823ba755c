"""Files that are complete or absent after a crash, and that only their owner may read; and their hashes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

OWNER_ONLY = 0o600
FOLDER_MODE = 0o700
HASH_BLOCK = 1 << 20


def private_folder(folder: Path) -> Path:
    """Makes `folder` for its owner alone; one that is there stays as it is."""
    folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    return folder


def write_durably(path: Path, data: bytes) -> None:
    """Puts `data` at `path` so that whatever happens the old file or the whole new one is there."""
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    write_new(part, data)
    part.replace(path)
    flush(path.parent)


def write_new(path: Path, data: bytes, mode: int = OWNER_ONLY) -> None:
    """A file that was not there, with this mode from the first byte on, flushed to the disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        # open's mode is subject to the umask.
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def remove_durably(path: Path) -> None:
    path.unlink(missing_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """What was written to this file is on disk when this returns; of a folder, the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK):
            digest.update(block)
    return digest.digest()
