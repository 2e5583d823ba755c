"""Files and folders that only their owner may read: keys, tokens, the server's state.

A file is complete or absent, whatever happens while it is written: it is made beside its place with mode 0600
from the first byte on, flushed to the disk, and moved there.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from fedmpq.system.durable_files import FOLDER_MODE, OWNER_ONLY, flush, write_new


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


def write_private(path: Path, data: bytes, *, overwrite: bool = False, mode: int = OWNER_ONLY) -> None:
    """Writes `data` to `path`; raises FileExistsError where a file is there, unless told to overwrite."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_new(part, data, mode)
        if overwrite:
            part.replace(path)
        else:
            # Unlike a rename, a link never takes the place of another file, not even in a race.
            path.hardlink_to(part)
    finally:
        part.unlink(missing_ok=True)
    flush(path.parent)
