"""The journal that `watched_disk.c` keeps of a process's files, and what a power cut leaves of them.

A power cut keeps what was flushed: bytes of a file once the file was, names in a folder once the folder was.
Of everything else it keeps what it likes. `Disk` follows the journal and says what may be left at any record
of it, in four ways, `CUTS`:

    dropped     nothing that was not flushed: neither bytes nor names
    names       all names, and of the files only bytes that were flushed: empty files under their last names
    scattered   of each file a random part of the writes, the last of them torn; of names a random beginning
    torn        everything, but of the last write only a beginning
"""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal, get_args

_HEAD = struct.Struct("=IIIIQqQ")
_SOURCE = Path(__file__).with_name("watched_disk.c")
_SECTOR = 512

Cut = Literal["dropped", "names", "scattered", "torn"]
CUTS: tuple[Cut, ...] = get_args(Cut)


class Kind(IntEnum):
    """As in watched_disk.c."""

    CREATE = 1
    WRITE = 2
    TRUNCATE = 3
    FLUSH = 4
    FLUSH_FOLDER = 5
    RENAME = 6
    UNLINK = 7
    LINK = 8
    MAKE_FOLDER = 9
    SEND = 10


@dataclass(frozen=True)
class Record:
    kind: Kind
    inode: int
    offset: int
    """Of a write; the new length of a truncation."""
    first: str
    second: str
    data: bytes


def build(folder: Path) -> Path:
    """The library to preload, compiled into the folder."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    assert compiler is not None, "no C compiler found: install one, e.g. gcc"
    library = folder / "watched_disk.so"
    words = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
    subprocess.run([compiler, *words], check=True)
    return library


def environment(
    library: Path, folder: Path, journal: Path | None = None, full: Path | None = None
) -> dict[str, str]:
    """What a process is started with to have its files in `folder` watched."""
    named = {"WATCHED_JOURNAL": journal, "WATCHED_FULL": full}
    given = {name: str(path) for name, path in named.items() if path is not None}
    return {"LD_PRELOAD": str(library), "WATCHED_FOLDER": str(folder), **given}


def read_journal(path: Path) -> Iterator[Record]:
    data = memoryview(path.read_bytes())
    at = 0
    while at < len(data):
        kind, first, second, _, inode, offset, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        names = bytes(data[at : at + first + second])
        at += first + second
        assert at + size <= len(data), "the journal's last record is cut short"
        yield Record(
            Kind(kind),
            inode,
            offset,
            names[:first].decode(),
            names[first:].decode(),
            bytes(data[at : at + size]),
        )
        at += size


# What is on the disk


@dataclass
class _File:
    flushed: bytearray = field(default_factory=bytearray)
    waiting: list[Record] = field(default_factory=list)
    """Writes and truncations since it was last flushed."""

    def flush(self) -> None:
        for change in self.waiting:
            _apply(self.flushed, change)
        self.waiting.clear()


class _Folder:
    """A folder is a thing with a name, too."""


_Thing = _File | _Folder


@dataclass(frozen=True)
class _Naming:
    """A change of names: `add` leads to `thing` from now on, and `remove` to nothing."""

    add: str | None
    remove: str | None
    thing: _Thing

    def touches(self, folder: str) -> bool:
        return folder in {path.rpartition("/")[0] for path in (self.add, self.remove) if path is not None}

    def apply(self, names: dict[str, _Thing]) -> None:
        if self.remove is not None:
            names.pop(self.remove, None)
        if self.add is not None:
            names[self.add] = self.thing


class Disk:
    """What was written, and what of it is sure to be there."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._inodes: dict[int, _File] = {}
        self._names: dict[str, _Thing] = {}
        self._sure: dict[str, _Thing] = {}
        self._waiting: list[_Naming] = []
        self._last_write: Record | None = None

    def follow(self, record: Record) -> None:
        kind = record.kind
        if kind is Kind.CREATE:
            file = self._inodes[record.inode] = _File()
            self._name(_Naming(record.first, None, file))
        elif kind in (Kind.WRITE, Kind.TRUNCATE):
            if (known := self._inodes.get(record.inode)) is not None:
                known.waiting.append(record)
                self._last_write = record if kind is Kind.WRITE else self._last_write
        elif kind is Kind.FLUSH:
            if (known := self._inodes.get(record.inode)) is not None:
                known.flush()
        elif kind is Kind.FLUSH_FOLDER:
            self._flush_folder(record.first)
        else:
            self._rename(record)

    def _rename(self, record: Record) -> None:
        if record.kind is Kind.MAKE_FOLDER:
            self._name(_Naming(record.first, None, _Folder()))
        elif record.kind is Kind.UNLINK and record.first in self._names:
            self._name(_Naming(None, record.first, self._names[record.first]))
        elif record.kind is Kind.RENAME and record.first in self._names:
            self._name(_Naming(record.second, record.first, self._names[record.first]))
        elif record.kind is Kind.LINK and record.first in self._names:
            self._name(_Naming(record.second, None, self._names[record.first]))

    def _name(self, naming: _Naming) -> None:
        naming.apply(self._names)
        self._waiting.append(naming)

    def _flush_folder(self, folder: str) -> None:
        left = []
        for naming in self._waiting:
            if naming.touches(folder):
                naming.apply(self._sure)
            else:
                left.append(naming)
        self._waiting = left

    def flush_all(self) -> None:
        """As an orderly end of the machine does."""
        for file in self._inodes.values():
            file.flush()
        for naming in self._waiting:
            naming.apply(self._sure)
        self._waiting = []

    def after_power_cut(self, cut: Cut, target: Path, moments: random.Random) -> None:
        """Writes into `target` what the folder holds when the power is back."""
        names = dict(self._sure)
        kept = {"dropped": 0, "scattered": moments.randint(0, len(self._waiting))}
        for naming in self._waiting[: kept.get(cut, len(self._waiting))]:
            naming.apply(names)
        contents: dict[int, bytes] = {}
        for name, thing in sorted(names.items()):
            path = target / name.removeprefix(self._folder).lstrip("/")
            # A file in a folder whose own name was lost is lost with it.
            if not self._is_reachable(name, names):
                continue
            if isinstance(thing, _Folder):
                path.mkdir(exist_ok=True)
                continue
            if id(thing) not in contents:
                contents[id(thing)] = self._content(thing, cut, moments)
            path.write_bytes(contents[id(thing)])

    def _is_reachable(self, name: str, names: dict[str, _Thing]) -> bool:
        parent = name.rpartition("/")[0]
        while parent != self._folder:
            if not isinstance(names.get(parent), _Folder):
                return False
            parent = parent.rpartition("/")[0]
        return True

    def _content(self, file: _File, cut: Cut, moments: random.Random) -> bytes:
        content = bytearray(file.flushed)
        waiting = file.waiting
        if cut in ("dropped", "names"):
            waiting = []
        elif cut == "scattered":
            waiting = [change for change in waiting if moments.random() < 0.5]
        for change in waiting:
            is_last = change is (self._last_write if cut == "torn" else waiting[-1])
            _apply(content, _torn(change, moments) if is_last and change.kind is Kind.WRITE else change)
        return bytes(content)


def _torn(change: Record, moments: random.Random) -> Record:
    """A beginning of the write, as a rule of whole sectors."""
    size = moments.randint(0, len(change.data))
    if moments.random() < 0.7:
        size -= (change.offset + size) % _SECTOR
    return Record(Kind.WRITE, change.inode, change.offset, "", "", change.data[: max(0, size)])


def _apply(content: bytearray, change: Record) -> None:
    end = change.offset + len(change.data)
    if change.kind is Kind.TRUNCATE:
        del content[change.offset :]
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    content[change.offset : end] = change.data
