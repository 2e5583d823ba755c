"""Files and folders that only their owner may read: keys, tokens, the server's state.

A file is complete or absent, whatever happens while it is written: it is made beside its place with mode 0600
from the first byte on, flushed to the disk, and moved there.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def private_folder(folder: Path) -> Path:
    """Makes `folder` and the missing ones above it, all with mode 0700; one that is there gets that mode.

    Those above that exist stay as they are: they are not the server's.
    """
    missing = [above for above in folder.parents if not above.exists()]
    for above in reversed(missing):
        above.mkdir(FOLDER_MODE)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    # mkdir's mode is subject to the umask, and says nothing of a folder that was there.
    folder.chmod(FOLDER_MODE)
    return folder


def write_private(path: Path, data: bytes, *, overwrite: bool = False, mode: int = FILE_MODE) -> None:
    """Writes `data` to `path`; raises FileExistsError where a file is there, unless told to overwrite."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_new(part, data, mode)
        if overwrite:
            part.replace(path)
        else:
            # Unlike a rename, a link never takes the place of another file, not even in a race.
            path.hardlink_to(part)
    finally:
        part.unlink(missing_ok=True)
    _flush_folder(path.parent)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
