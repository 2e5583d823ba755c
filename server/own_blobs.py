"""The blobs of one database. Each knows the other by an id, and only what the database put is ever deleted.

The id is made at the first start and stands in a small object among the blobs and in a row of the database.
So a database that is empty or of another server is told apart from the right one, and a place that is empty,
because a disk is not mounted, from the one that holds the models.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from fedmpq.exchange.wire import digest
from fedmpq.server.blobs import BlobError, Blobs, BlobsAway, open_blobs
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.protocol import Store

IN_STATE_FOLDER = ""
"""What the database remembers of a place that moves with the state folder."""


class OwnBlobs:
    """The blobs at a place that belong to a database; what it puts is recorded there before."""

    def __init__(self, blobs: Blobs, store: Store, owner: str | None, location: str) -> None:
        self.lock: threading.Lock = blobs.lock
        self.location = location
        self.behind = blobs
        self.store = store
        self.owner_id = owner

    def put(self, data: bytes) -> bytes:
        return self.put_all([data])[0]

    def put_all(self, items: Sequence[bytes]) -> list[bytes]:
        self._require_present()
        self.store.record_blobs([digest(data) for data in items])
        return self.behind.put_all(items)

    def read(self, name: bytes) -> bytes:
        try:
            return self.behind.read(name)
        except BlobError:
            # One is missing, or all of them are.
            self._require_present()
            raise

    def delete(self, name: bytes) -> None:
        self.behind.delete(name)

    def names(self) -> Iterator[bytes]:
        return self.behind.names()

    def owner(self) -> str | None:
        return self.behind.owner()

    def set_owner(self, owner: str) -> None:
        self.behind.set_owner(owner)

    def _require_present(self) -> None:
        if self.owner_id is not None and self.behind.owner() != self.owner_id:
            raise BlobsAway(f"{self.location} is away, or other payloads are in its place; bring it back")


def place_of_blobs(store: Store, given: str | None, state_blobs: Path) -> str:
    """Where they are: as given, or else as the database remembers it, or else in the state folder."""
    return given or store.fact("blobs") or str(state_blobs)


def open_own_blobs(store: Store, given: str | None, state_blobs: Path, *, shared: bool = False) -> OwnBlobs:
    """The blobs of this database, for its server; those of another are refused and left as they are."""
    location = place_of_blobs(store, given, state_blobs)
    found = open_blobs(location, make=False)
    owner = _agreed(store, found, location, state_blobs)
    blobs = open_blobs(location, shared=shared)
    if found.owner() is None:
        blobs.set_owner(owner)
    in_folder = _same_place(location, str(state_blobs))
    remembered = (
        IN_STATE_FOLDER if in_folder else location if "://" in location else str(Path(location).resolve())
    )
    if (store.fact("id"), store.fact("blobs")) != (owner, remembered):
        store.remember(id=owner, blobs=remembered)
    return OwnBlobs(blobs, store, owner, location)


class FrontBlobs(OwnBlobs):
    """The same blobs for a front-end: it puts and reads, and the leader alone deletes. What a front-end finds
    superfluous may be needed by another one."""

    def delete(self, name: bytes) -> None:
        pass


def join_own_blobs(store: Store, given: str | None, state_blobs: Path) -> FrontBlobs:
    """The blobs of a database whose leader has opened them; StoreFailed before that."""
    owner, remembered = store.fact("id"), store.fact("blobs")
    if owner is None or remembered is None:
        raise StoreFailed("no leader has begun on this database yet; start one: fedmpq server --role leader")
    location = place_of_blobs(store, given, state_blobs)
    require_shared(location, state_blobs)
    blobs = open_blobs(location, shared=True, make=False)
    if blobs.owner() != owner:
        raise BlobsAway(
            f"the payloads of this database are not in {location}; they are in {remembered}: mount it here, "
            "or name their place with --blobs"
        )
    return FrontBlobs(blobs, store, owner, location)


def require_shared(location: str, state_blobs: Path) -> None:
    """Raises BlobError for a place that other machines do not reach: the one in the state folder."""
    if _same_place(location, str(state_blobs)):
        raise BlobError(
            f"the payloads are in {location}, which front-ends do not reach; name a place that the leader "
            "and all front-ends share: --blobs s3://BUCKET/FOLDER, or a folder that is mounted everywhere"
        )


def _agreed(store: Store, found: Blobs, location: str, state_blobs: Path) -> str:
    """The id under which the database and the blobs belong together, new if neither has one."""
    own, theirs = store.fact("id"), found.owner()
    recorded = store.recorded_blobs()
    if theirs is None and not recorded and any(True for _ in found.names()):
        raise BlobError(_unknown_payloads(location))
    if own is None and theirs is None:
        return uuid.uuid4().hex
    if own is None:
        assert theirs is not None
        # The first start was cut off, or the database was brought back as it was before it had an id.
        if recorded.intersection(found.names()) or not any(True for _ in found.names()):
            return theirs
        raise BlobError(_unknown_payloads(location))
    if theirs is None and recorded:
        raise BlobError(_missing_payloads(location, store.fact("blobs") or str(state_blobs)))
    if theirs not in (None, own):
        raise BlobError(
            f"the payloads in {location} belong to another database (id {theirs}) than this one (id {own}); "
            "bring back the database that goes with them, or name the right --blobs; nothing was changed"
        )
    return own


def _unknown_payloads(location: str) -> str:
    return (
        f"{location} holds payloads that this database knows nothing of: it is new, empty or another; bring "
        "back the database that goes with them, or name another --blobs; nothing was changed"
    )


def _missing_payloads(location: str, remembered: str) -> str:
    return (
        f"the payloads of this database are not in {location}; they were in {remembered}: bring that back "
        "(mount it), or name their place with --blobs; nothing was changed"
    )


def _same_place(one: str, other: str) -> bool:
    return "://" not in one and Path(one).resolve() == Path(other).resolve()
