"""A leader's blobs: answers are read while others are still on their way, and deleted while the next come.

In a server that is alone the answers have just gone through its memory or its own disk. A leader has to fetch
them, from another machine perhaps, and a round would wait for that once all answers are there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from fedmpq.server.blobs import BlobError
from fedmpq.server.own_blobs import OwnBlobs

log = logging.getLogger("fedmpq.server")

HELD_BYTES = 256 << 20
"""Of the open round's answers, so much is in memory."""
AT_ONCE = 4
DELETED_AT_ONCE = 32
"""So few, because a commit waits for them."""


class ReadAhead(OwnBlobs):
    """The same blobs with some of them in memory."""

    def __init__(self, blobs: OwnBlobs) -> None:
        super().__init__(blobs.behind, blobs.store, blobs.owner_id, blobs.location)
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="ahead")
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="delete")
        self._held: dict[bytes, bytes] = {}
        self._bytes = 0
        self._guard = threading.Lock()

    def expect(self, names: Iterable[bytes], then: Callable[[bytes, bytes], None]) -> None:
        """These will be asked for; they are fetched now as far as there is room, and `then` is told the name
        and the bytes of each."""
        for name in names:
            self._threads.submit(self._fetch, name, then)

    def _fetch(self, name: bytes, then: Callable[[bytes, bytes], None]) -> None:
        if name in self._held or self._bytes >= HELD_BYTES:
            return
        try:
            data = super().read(name)
        except (OSError, BlobError):
            # Whoever needs it asks again, and is told.
            return
        with self._guard:
            if self._bytes + len(data) <= HELD_BYTES and name not in self._held:
                self._held[name] = data
                self._bytes += len(data)
        then(name, data)

    def read(self, name: bytes) -> bytes:
        held = self._held.get(name)
        return super().read(name) if held is None else held

    def delete_later(self, names: Collection[bytes]) -> None:
        """Those are needed no more. They are forgotten in the store once they are deleted; what a leader that
        is killed has not come to, the next one sweeps."""
        with self._guard:
            self._held.clear()
            self._bytes = 0
        gone = list(names)
        for start in range(0, len(gone), DELETED_AT_ONCE):
            self._deleter.submit(self._delete, gone[start : start + DELETED_AT_ONCE])

    def _delete(self, names: Collection[bytes]) -> None:
        try:
            with self.lock:
                # A model may have become that of another run, or of this one again.
                gone = set(names) - self.store.blobs_in_use()
                for name in gone:
                    self.delete(name)
                self.store.forget_blobs(gone)
        except OSError as error:
            log.warning("payloads that are needed no more stay for now: %s", error)

    def close(self) -> None:
        """When all of it is done."""
        self._threads.shutdown()
        self._deleter.shutdown()
