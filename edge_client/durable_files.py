"""Files that are complete or absent after a crash, and that only their owner may read."""

from __future__ import annotations

import os
from pathlib import Path

OWNER_ONLY = 0o600
FOLDER_MODE = 0o700


def private_folder(folder: Path) -> Path:
    """Makes `folder` for its owner alone; one that is there stays as it is."""
    folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
    return folder


def write_durably(path: Path, data: bytes) -> None:
    """Puts `data` at `path` so that whatever happens the old file or the whole new one is there."""
    part = path.with_name(f".{path.name}.new")
    part.unlink(missing_ok=True)
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    _flush_folder(path.parent)


def remove_durably(path: Path) -> None:
    path.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _flush_folder(folder: Path) -> None:
    """Makes the names in it durable: a file's own flush does not."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
