"""Uploads on their way in at front-ends: a board that meets another one goes on where it broke off.

What arrives goes to a file, as in a server that is alone. Whenever there is enough of it, and when a call
breaks off, it also becomes a blob, and the store says which piece of the upload that is. Another front-end
makes its file of these pieces. What was on its way when a front-end was killed is sent again.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from fedmpq.server.blobs import BlobError, Blobs, BlobsAway, Uploads
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import UploadPart

PART_BYTES = 256 << 10
"""So much of an upload is put down as one piece."""


class SharedUploads(Uploads):
    """The uploads of all clients at one front-end."""

    def __init__(self, folder: Path, store: Store, blobs: Blobs) -> None:
        super().__init__(folder)
        self._store = store
        self._blobs = blobs
        self._ends: dict[tuple[str, bytes], tuple[int, int]] = {}
        """Of the files here: how much of each is in pieces, and how much there is."""
        self.keep_only(())

    def stored(self, client_id: str, name: bytes) -> int:
        parts = self._store.upload_parts(client_id, name)
        return parts[-1].end if parts else 0

    def begin(self, client_id: str, name: bytes, offset: int) -> None:
        known = self._ends.get((client_id, name))
        if known is not None and known[1] >= offset:
            super().begin(client_id, name, offset)
        else:
            super().begin(client_id, name, 0)
            self._fetch(client_id, name, offset)
        self._store.forget_other_uploads(client_id, name)
        if offset < self.stored(client_id, name):
            # A piece that reaches beyond the offset is put down anew, from its beginning.
            self._store.forget_upload(client_id, name, beyond=offset)
        self._ends[client_id, name] = (self.stored(client_id, name), offset)

    def _fetch(self, client_id: str, name: bytes, offset: int) -> None:
        for part in self._store.upload_parts(client_id, name):
            if part.start >= offset:
                break
            try:
                data = self._blobs.read(part.blob)
            except BlobError:
                self._store.forget_upload(client_id, name, beyond=part.start)
                raise BlobsAway("a piece of this upload is lost: ask for its offset again") from None
            super().write(client_id, name, part.start, data[: offset - part.start])

    def write(self, client_id: str, name: bytes, offset: int, data: bytes) -> None:
        super().write(client_id, name, offset, data)
        put, _ = self._ends[client_id, name]
        self._ends[client_id, name] = (put, offset + len(data))
        if offset + len(data) - put >= PART_BYTES:
            self.settle(client_id, name)

    def settle(self, client_id: str, name: bytes) -> None:
        put, end = self._ends.get((client_id, name), (0, 0))
        if end <= put:
            return
        with self.path(client_id, name).open("rb") as file:
            file.seek(put)
            data = file.read(end - put)
        part = UploadPart(put, len(data), self._blobs.put(data))
        self._store.add_upload_part(client_id, name, part)
        self._ends[client_id, name] = (part.end, end)

    def drop(self, client_id: str, name: bytes) -> None:
        super().drop(client_id, name)
        put, _ = self._ends.pop((client_id, name), (0, 0))
        if put:
            self._store.forget_upload(client_id, name)

    def keep_only(self, client_ids: Collection[str]) -> None:
        super().keep_only(client_ids)
        self._ends = {key: ends for key, ends in self._ends.items() if key[0] in client_ids}


class LedUploads(Uploads):
    """The leader's part of it: it receives nothing, and says when pieces are needed no more."""

    def __init__(self, folder: Path, store: Store) -> None:
        super().__init__(folder)
        self._store = store

    def keep_only(self, client_ids: Collection[str]) -> None:
        super().keep_only(client_ids)
        self._store.keep_uploads_of(client_ids)
