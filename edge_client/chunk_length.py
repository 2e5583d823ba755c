"""How much of a payload goes into one message.

A message that breaks off half-way is lost whole. Where connections are cut after few bytes, short messages
are the only ones that arrive; where they hold, long ones cost less.
"""

from __future__ import annotations

DEFAULT_CHUNK = 64 << 10
LEAST_CHUNK = 1 << 10
LARGEST_CHUNK = (1 << 20) - (1 << 10)
"""With its framing a chunk must fit the server's messages of 1 MiB."""
MOVED_TO_GROW = 32


class ChunkLength:
    """Bytes of the next chunk: half as many after each transfer that broke, but not below `LEAST_CHUNK`, and
    twice as many after `MOVED_TO_GROW` chunks in a row, up to what the server wishes."""

    def __init__(self, most: int = DEFAULT_CHUNK) -> None:
        self._most = self._bytes = most
        self._moved = 0

    @property
    def bytes(self) -> int:
        return self._bytes

    def wish(self, wished: int) -> None:
        """The server's word, as far as it fits a message; 0: it has none."""
        was_most = self._bytes == self._most
        self._most = min(wished, LARGEST_CHUNK) if wished > 0 else DEFAULT_CHUNK
        self._bytes = self._most if was_most else min(self._bytes, self._most)

    def moved(self) -> None:
        self._moved += 1
        if self._moved >= MOVED_TO_GROW:
            self._moved = 0
            self._bytes = min(self._most, 2 * self._bytes)

    def broke(self) -> None:
        self._moved = 0
        self._bytes = min(self._most, max(LEAST_CHUNK, self._bytes // 2))
