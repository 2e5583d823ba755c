"""Payloads by their SHA-256: models, graphs and updates that stored facts refer to, and uploads on their way.

A blob is there whole or not at all, and once `put` has returned it survives a power cut. Nothing
is ever written over: the same bytes have the same name.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from fedmpq.exchange.wire import digest
from fedmpq.system.durable_files import file_digest, replacing, write_all_durably, write_durably
from fedmpq.system.private_folders import private_folder

log = logging.getLogger("fedmpq.server")

OFFER_SECONDS = 30.0
"""A file that was offered is kept so long for a download to begin."""
HELD_BYTES = 32 << 20
"""Of the open round's payloads, so much is in memory for downloads."""
READ_SECONDS = 600.0
"""A download counts as one so long after it moved last."""
FLUSHED_AT_ONCE = 16
"""Files that wait for the disk at a time; flushing needs no core."""
SHARED_SECONDS = 3600.0
"""In a folder that others write to as well, what is half written for so long is left over."""
Use = Literal["read", "offered", "none"]
_NAME = re.compile(r"[0-9a-f]{64}")
_OWNER = "database-id"
"""Under this name the blobs have the id of the database they belong to."""


class BlobError(ValueError):
    """A place for blobs that cannot be used, or a blob that is not there or damaged."""

    def __init__(self, message: str, name: bytes | None = None) -> None:
        super().__init__(message)
        self.name = name
        """Of the blob; None: the whole place cannot be used."""


class BlobsAway(OSError):
    """The place of the blobs cannot be reached, or is not what it was; it may come back."""


class Blobs(Protocol):
    """Bytes by their SHA-256. `lock` is held by who puts a blob until the fact that refers to it is stored,
    and by who deletes: two equal models of two runs are one blob."""

    lock: threading.Lock

    def put(self, data: bytes) -> bytes:
        """Their name. What was there under that name, damaged perhaps, is these bytes and durable now."""

    def put_all(self, items: Sequence[bytes]) -> list[bytes]:
        """The names of several, put together; durable when this returns."""

    def read(self, name: bytes) -> bytes: ...
    def delete(self, name: bytes) -> None: ...
    def names(self) -> Iterator[bytes]: ...

    def owner(self) -> str | None:
        """The id of the database they belong to; None: they have none, or the place is not there."""

    def set_owner(self, owner: str) -> None: ...


def open_blobs(location: str, *, make: bool = True, shared: bool = False) -> Blobs:
    """A folder, or any URL that fsspec knows, such as s3://bucket/folder; a folder is made if so told, and
    what a crash has left half written in it is cleared away, of one that is `shared` only what is old."""
    if "://" not in location:
        return FolderBlobs(Path(location), make=make, shared=shared)
    if location.startswith("file://"):
        return FolderBlobs(Path(location.removeprefix("file://")), make=make, shared=shared)
    return RemoteBlobs(location)


class FolderBlobs:
    """Files named by their hash in one folder."""

    def __init__(self, folder: Path, *, make: bool = True, shared: bool = False) -> None:
        self.lock = threading.Lock()
        self._folder = folder
        self._flushers = ThreadPoolExecutor(FLUSHED_AT_ONCE, thread_name_prefix="flush")
        if not make:
            return
        private_folder(folder)
        newest = time.time() - (SHARED_SECONDS if shared else 0.0)
        for partial in folder.glob(".*.partial"):
            if not shared or partial.stat().st_mtime < newest:
                partial.unlink(missing_ok=True)

    def path(self, name: bytes) -> Path:
        return self._folder / name.hex()

    def put(self, data: bytes) -> bytes:
        name = digest(data)
        write_durably(self.path(name), data)
        return name

    def put_all(self, items: Sequence[bytes]) -> list[bytes]:
        if len(items) == 1:
            return [self.put(items[0])]
        names = [digest(data) for data in items]
        files = {self.path(name): data for name, data in zip(names, items, strict=True)}
        write_all_durably(files, self._flushers)
        return names

    def read(self, name: bytes) -> bytes:
        try:
            data = self.path(name).read_bytes()
        except FileNotFoundError:
            raise BlobError(
                f"blob {name.hex()} is missing from {self._folder}; bring it back", name
            ) from None
        return _checked(name, data)

    def delete(self, name: bytes) -> None:
        self.path(name).unlink(missing_ok=True)

    def names(self) -> Iterator[bytes]:
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if _NAME.fullmatch(path.name):
                yield bytes.fromhex(path.name)

    def owner(self) -> str | None:
        try:
            return (self._folder / _OWNER).read_text(encoding="ascii").strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def set_owner(self, owner: str) -> None:
        write_durably(self._folder / _OWNER, f"{owner}\n".encode())


class RemoteBlobs:
    """Objects named by their hash under an fsspec URL; what is behind it writes an object whole or not.

    Whatever a library raises because it is away becomes `BlobsAway`, which is waited out as a disk is.
    """

    def __init__(self, url: str) -> None:
        self.lock = threading.Lock()
        self._url = url
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError:
            raise BlobError(f'{url} needs fsspec; install it: pip install "fedmpq[server]"') from None
        try:
            filesystem, self._root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise BlobError(f"{url} cannot be opened: {error}") from None
        self._files: Any = filesystem
        self._owner: str | None = None
        with self._reached():
            self._files.makedirs(self._root, exist_ok=True)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except (OSError, BlobError):
            raise
        # Those of a network are of no common class: botocore's, for one, are plain exceptions.
        except Exception as error:
            raise BlobsAway(f"{self._url} cannot be reached: {' '.join(str(error).split())}") from error

    def _path(self, name: bytes) -> str:
        return f"{self._root.rstrip('/')}/{name.hex()}"

    def put(self, data: bytes) -> bytes:
        name = digest(data)
        with self._reached():
            self._files.pipe_file(self._path(name), data)
        return name

    def put_all(self, items: Sequence[bytes]) -> list[bytes]:
        names = [digest(data) for data in items]
        with self._reached():
            self._files.pipe({self._path(name): data for name, data in zip(names, items, strict=True)})
        return names

    def read(self, name: bytes) -> bytes:
        try:
            with self._reached():
                data: bytes = self._files.cat_file(self._path(name))
        except FileNotFoundError:
            raise BlobError(f"blob {name.hex()} is missing from {self._root}; bring it back", name) from None
        return _checked(name, data)

    def delete(self, name: bytes) -> None:
        with self._reached():
            if self._files.exists(self._path(name)):
                self._files.rm_file(self._path(name))

    def names(self) -> Iterator[bytes]:
        try:
            with self._reached():
                self._files.invalidate_cache()
                paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            # An object store has no folders: one without objects is not there.
            return
        for path in paths:
            if _NAME.fullmatch(name := path.rpartition("/")[2]):
                yield bytes.fromhex(name)

    def owner(self) -> str | None:
        """Read once: unlike a disk, what is behind a URL is not taken away and put back empty."""
        if self._owner is None:
            try:
                with self._reached():
                    data: bytes = self._files.cat_file(f"{self._root.rstrip('/')}/{_OWNER}")
            except FileNotFoundError:
                return None
            self._owner = data.decode("ascii").strip()
        return self._owner

    def set_owner(self, owner: str) -> None:
        with self._reached():
            self._files.pipe_file(f"{self._root.rstrip('/')}/{_OWNER}", f"{owner}\n".encode())


class Uploads:
    """Updates on their way in: one file for each client, as long as what has arrived of it.

    These files are not flushed to disk. What a power cut does to one shows in its hash; it is sent again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        private_folder(folder)
        self._senders = {path.name.partition(".")[0] for path in folder.iterdir()}

    def path(self, client_id: str, name: bytes) -> Path:
        return self._folder / f"{client_id}.{name.hex()}"

    def may_have(self, client_id: str) -> bool:
        """Whether there may be a file of the client's; if not, there is none."""
        return client_id in self._senders

    def stored(self, client_id: str, name: bytes) -> int:
        """Bytes that have arrived."""
        try:
            return self.path(client_id, name).stat().st_size
        except FileNotFoundError:
            return 0

    def begin(self, client_id: str, name: bytes, offset: int) -> None:
        """Forget every other upload of the client, and what is stored of this one beyond `offset`."""
        if self.may_have(client_id):
            for other in self._folder.glob(f"{client_id}.*"):
                if other != self.path(client_id, name):
                    other.unlink(missing_ok=True)
        self._senders.add(client_id)
        self.path(client_id, name).touch(mode=0o600)
        os.truncate(self.path(client_id, name), offset)

    def write(self, client_id: str, name: bytes, offset: int, data: bytes) -> None:
        """Where they belong, not at the end: a write of a call that broke may come late, beside the next."""
        descriptor = os.open(self.path(client_id, name), os.O_WRONLY)
        try:
            while data:
                written = os.pwrite(descriptor, data, offset)
                data, offset = data[written:], offset + written
        finally:
            os.close(descriptor)

    def settle(self, client_id: str, name: bytes) -> None:
        """A call has broken off: what was written is where the next one finds it."""

    def drop(self, client_id: str, name: bytes) -> None:
        self.path(client_id, name).unlink(missing_ok=True)

    def keep_only(self, client_ids: Collection[str]) -> None:
        """What others have sent is removed: nobody can go on with it."""
        for path in self._folder.iterdir():
            if (sender := path.name.partition(".")[0]) not in client_ids:
                path.unlink(missing_ok=True)
                self._senders.discard(sender)

    def forget(self, client_id: str) -> None:
        for path in self._folder.glob(f"{client_id}.*"):
            path.unlink(missing_ok=True)


@dataclass
class _Lent:
    """A file that is kept elsewhere, when it was last offered or read from, and by how many it is now."""

    path: Path
    at: float
    readers: int = 0


class Outgoing:
    """Assignment payloads of the open round as files, encoded once for all clients that are dealt the same.

    They can be made again from the global model, so they are not flushed to disk; `holds` says if one is
    whole.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._lent: dict[bytes, _Lent] = {}
        self._verified: dict[bytes, tuple[int, int, int]] = {}
        self._held: dict[bytes, bytes] = {}
        private_folder(folder)

    def path(self, name: bytes) -> Path:
        lent = self._lent.get(name)
        return self._folder / name.hex() if lent is None else lent.path

    def lend(self, name: bytes, path: Path) -> None:
        """Also hand out a file that is kept elsewhere, such as an exported model."""
        self._lent[name] = _Lent(path, self._clock())

    @contextmanager
    def reading(self, name: bytes) -> Iterator[None]:
        """While a client downloads it."""
        lent = self._lent.get(name)
        if lent is None:
            yield
            return
        lent.readers += 1
        try:
            yield
        finally:
            lent.readers -= 1

    def use_of(self, folder: Path) -> Use:
        """What files lent from this folder are used for. A download that has not moved for long is none."""
        now = self._clock()
        lent = [one for one in self._lent.values() if one.path.parent == folder]
        if any(one.readers and now - one.at < READ_SECONDS for one in lent):
            return "read"
        return "offered" if any(now - one.at < OFFER_SECONDS for one in lent) else "none"

    def take_back(self, folder: Path) -> None:
        """Files from this folder are handed out no more."""
        self._lent = {name: one for name, one in self._lent.items() if one.path.parent != folder}

    def put(self, data: bytes) -> bytes:
        name = digest(data)
        with replacing(self.path(name), durable=False) as file:
            file.write(data)
        if sum(map(len, self._held.values())) + len(data) <= HELD_BYTES:
            self._held[name] = data
        return name

    def held(self, name: bytes) -> bytes | None:
        """A payload of the open round that is in memory; many clients download the same one."""
        return self._held.get(name)

    def size(self, name: bytes) -> int | None:
        """Of a file that is whole; a payload that is damaged is removed, to be made again.

        It is hashed the first time, and again whenever its size or its time have changed.
        """
        try:
            facts = self.path(name).stat()
        except FileNotFoundError:
            return None
        seen = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if self._verified.get(name) == seen:
            return facts.st_size
        if not self.holds(name):
            log.error("%s is damaged: its bytes have another hash; it is not handed out", self.path(name))
            if name not in self._lent:
                self.path(name).unlink(missing_ok=True)
            return None
        self._verified[name] = seen
        return facts.st_size

    def read(self, name: bytes, offset: int, count: int) -> bytes:
        """Nothing if there is none of that name any more."""
        if (lent := self._lent.get(name)) is not None:
            lent.at = self._clock()
        try:
            with self.path(name).open("rb") as file:
                file.seek(offset)
                return file.read(count)
        except FileNotFoundError:
            return b""

    def holds(self, name: bytes) -> bool:
        try:
            return file_digest(self.path(name)) == name
        except FileNotFoundError:
            return False

    def keep_only(self, names: Collection[bytes]) -> None:
        self._held = {name: data for name, data in self._held.items() if name in names}
        kept = {name.hex() for name in names}
        for path in self._folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)


def _checked(name: bytes, data: bytes) -> bytes:
    if digest(data) != name:
        message = f"blob {name.hex()} is damaged: its bytes have another hash; bring back a good copy"
        raise BlobError(message, name)
    return data
