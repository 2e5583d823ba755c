"""Whether the files of a data source have changed since they were last looked at."""

from __future__ import annotations

import os
from pathlib import Path

from fedmpq.data.open_source import Spec, names_object
from fedmpq.data.options import split_options

Fingerprint = frozenset[tuple[str, int, int]]
"""Path, size and time of change of every file."""


def fingerprint(spec: Spec) -> Fingerprint:
    """Of the file, or of every visible file in the folder; none of a source of one's own: it is read once."""
    if names_object(spec):
        return frozenset()
    path = Path(split_options(os.fspath(spec))[0]).expanduser()
    if path.is_file():
        return frozenset(_mark(path))
    walked = os.walk(path)
    return frozenset(
        mark for folder, folders, files in walked for mark in _marks(Path(folder), folders, files)
    )


def _marks(folder: Path, folders: list[str], files: list[str]) -> list[tuple[str, int, int]]:
    folders[:] = [name for name in folders if not name.startswith(".")]
    # An empty class folder counts too: it has a label.
    found = [(str(folder / name), -1, -1) for name in folders]
    for name in files:
        if not name.startswith("."):
            found += _mark(folder / name)
    return found


def _mark(path: Path) -> list[tuple[str, int, int]]:
    """None of a file that is gone by now."""
    try:
        status = path.stat()
    except OSError:
        return []
    return [(str(path), status.st_size, status.st_mtime_ns)]
