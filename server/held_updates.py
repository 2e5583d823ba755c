"""Updates of the open round that were taken apart when they were checked, for the merge to have them so."""

from __future__ import annotations

import threading

from fedmpq.exchange.messages import Update

HELD_BYTES = 16 << 20
"""Of one round; a merge reads the others from their blobs."""


class HeldUpdates:
    """By the names of their blobs, which have the same bytes and last: without these a merge is the same."""

    def __init__(self, most: int = HELD_BYTES) -> None:
        self._most = most
        self._bytes = 0
        self._held: dict[bytes, Update] = {}
        # Several are checked at a time.
        self._lock = threading.Lock()

    def keep(self, name: bytes, update: Update) -> None:
        """As long as there is room."""
        with self._lock:
            if name not in self._held and self._bytes + update.nbytes <= self._most:
                self._held[name] = update
                self._bytes += update.nbytes

    def get(self, name: bytes) -> Update | None:
        return self._held.get(name)
