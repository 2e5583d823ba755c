"""Files that are whole or absent whatever happens while they are written, and their hashes.

A file is written beside its place, under the name `.NAME.partial`, and then moved there. The next write of
the same file removes what a crash has left under that name, so a path must not have two writers at a time,
except with `create_durably`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

OWNER_ONLY = 0o600
HASH_BLOCK = 1 << 20


@contextmanager
def replacing(path: Path, *, private: bool = True, durable: bool = True) -> Iterator[BinaryIO]:
    """A file to write that takes the place of `path` when the block ends; an error leaves the old file.

    A private file has mode 0600 from the first byte on, another the mode that the umask gives. A durable file
    is on the disk, under its name, when the block has ended; one that is not may be lost by a power cut.
    """
    part = path.with_name(f".{path.name}.partial")
    part.unlink(missing_ok=True)
    try:
        with _new_file(part, private) as file:
            yield file
            if durable:
                _flush_file(file)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if durable:
        flush(path.parent)


def write_durably(path: Path, data: bytes, *, private: bool = True) -> None:
    """Puts `data` at `path`: after a crash the old file or the whole new one is there."""
    with replacing(path, private=private) as file:
        file.write(data)


def write_all_durably(files: Mapping[Path, bytes], flushers: Executor) -> None:
    """Puts new private files in one folder; all are on the disk, under their names, when this returns.

    They are flushed at the same time, which file systems answer with few writes of their journals. Those that
    were there are replaced; an error may leave some in place, each of them whole.
    """
    parts = {path: path.with_name(f".{path.name}.partial") for path in files}
    try:
        for path, data in files.items():
            parts[path].unlink(missing_ok=True)
            with _new_file(parts[path], private=True) as file:
                file.write(data)
        for _ in flushers.map(flush, parts.values()):
            pass
        for path, part in parts.items():
            part.replace(path)
    except BaseException:
        for part in parts.values():
            part.unlink(missing_ok=True)
        raise
    for folder in {path.parent for path in files}:
        flush(folder)


def create_durably(path: Path, data: bytes) -> None:
    """A new private file with `data`; raises FileExistsError where any file, even a broken link, is there."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with _new_file(part, private=True) as file:
            file.write(data)
            _flush_file(file)
        # Unlike a rename, a link never takes the place of another file, not even in a race.
        path.hardlink_to(part)
    finally:
        part.unlink(missing_ok=True)
    flush(path.parent)


def append_durably(path: Path, data: bytes) -> None:
    """Adds `data` to the end of the file, which is made if it is not there; on the disk when this returns."""
    is_new = not path.exists()
    with path.open("ab") as file:
        file.write(data)
        _flush_file(file)
    if is_new:
        flush(path.parent)


def move_durably(source: Path, target: Path) -> None:
    """Moves a file within one file system; its bytes and its new name are on the disk when this returns."""
    flush(source)
    source.replace(target)
    flush(target.parent)


def remove_durably(path: Path) -> None:
    """Removes the file, if it is there; it does not come back after a power cut."""
    path.unlink(missing_ok=True)
    flush(path.parent)


def flush(path: Path) -> None:
    """Waits until what was written to a file, or the list of names in a folder, is on the disk."""
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


def _new_file(path: Path, private: bool) -> BinaryIO:
    """An open file that was not there before."""
    mode = OWNER_ONLY if private else 0o666
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    if private:
        # The umask may have taken the owner's own rights away.
        os.fchmod(descriptor, mode)
    return os.fdopen(descriptor, "wb")


def _flush_file(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
