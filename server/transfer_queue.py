"""Lets a few transfers through at a time, and each identity in its turn.

A transfer that needs a slot waits in a line, where an identity has one place however many calls it makes.
A place is kept for a while when its call breaks off, so who tries again does not begin at the end. A slot is
held for a slice of time by who keeps moving bytes. Who does not loses it, and from then on holds one only
while the server works on what has arrived, never while it waits for the other side. So stalled and dripping
transfers go on at their own pace, and cost the others next to nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Literal

TICK_SECONDS = 0.5
TICK_BYTES = 2 << 10
"""Who moves fewer in a tick, because the other side does not, is slow."""
SLICE_TICKS = 2
"""After so many a slot goes to the next in line."""
KEPT_SECONDS = 60.0
"""A place in the line outlives the call that took it by this."""
Line = Literal["upload", "download", "slow"]
# Every download ends in an upload, and who waits with one has its bytes in the server's buffers. No line is
# left out for ever.
SHARES: tuple[Line, ...] = ("upload", "download", "upload", "slow")
FALLBACK: tuple[Line, ...] = ("upload", "download", "slow")


@dataclass
class _Place:
    """An identity's place in a line."""

    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    left: float = 0.0
    """When its last call went away."""


class TransferQueue:
    """At most `slots` transfers are at work at a time, at most one of each identity."""

    def __init__(self, slots: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = slots
        self._clock = clock
        self._lines: dict[Line, OrderedDict[str, _Place]] = {line: OrderedDict() for line in FALLBACK}
        self._handed_out = 0
        self._at_work: set[str] = set()
        self._slow: set[str] = set()

    @asynccontextmanager
    async def transfer(self, identity: str, *, upload: bool) -> AsyncIterator[Transfer]:
        """A transfer of the identity's, which has no slot yet."""
        transfer = Transfer(self, identity, upload)
        try:
            yield transfer
            transfer.judge()
        finally:
            transfer.release()

    def is_slow(self, identity: str) -> bool:
        return identity in self._slow

    def mark(self, identity: str, *, slow: bool) -> None:
        (self._slow.add if slow else self._slow.discard)(identity)

    def now(self) -> float:
        return self._clock()

    async def enter(self, identity: str, line: Line) -> None:
        """When it is the identity's turn."""
        self._forget_old(self._lines[line])
        place = self._lines[line].setdefault(identity, _Place())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place.waiting.append(turn)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # It was let in at the moment it gave up.
                self.leave(identity)
            else:
                place.waiting.remove(turn)
                place.left = self._clock()
            raise

    def leave(self, identity: str) -> None:
        self._at_work.discard(identity)
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free > 0 and (turn := self._next()) is not None:
            self._free -= 1
            self._handed_out += 1
            turn.set_result(None)

    def _next(self) -> asyncio.Future[None] | None:
        """Whoever is next, out of its line and at work; None: nobody waits who may."""
        for line in (SHARES[self._handed_out % len(SHARES)], *FALLBACK):
            places = self._lines[line]
            self._forget_old(places)
            ready = (one for one, place in places.items() if place.waiting and one not in self._at_work)
            if (identity := next(ready, None)) is not None:
                turn = places[identity].waiting.popleft()
                if places[identity].waiting:
                    places.move_to_end(identity)
                else:
                    del places[identity]
                self._at_work.add(identity)
                return turn
        return None

    def _forget_old(self, places: OrderedDict[str, _Place]) -> None:
        """The first in line may be those whose calls broke off and did not come again."""
        oldest = self._clock() - KEPT_SECONDS
        while places:
            identity, place = next(iter(places.items()))
            if place.waiting or place.left > oldest:
                return
            del places[identity]


class Transfer:
    """One transfer: `work` before the server does something for it, `waiting` around what the other side
    does, `moved` for what has come over."""

    def __init__(self, queue: TransferQueue, identity: str, upload: bool) -> None:
        self._queue = queue
        self._identity = identity
        self._line: Line = "upload" if upload else "download"
        self.has_slot = False
        self._is_waiting = False
        self._timer: asyncio.TimerHandle | None = None
        self._ticks = 0
        self._tick_bytes = 0
        # Since when, and how many bytes; the time in the line does not count.
        self._since = queue.now()
        self._bytes = 0

    async def work(self) -> None:
        """When this transfer has a slot; it keeps it no longer than its slice."""
        if self.has_slot:
            return
        asked = self._queue.now()
        slow = self._queue.is_slow(self._identity)
        await self._queue.enter(self._identity, "slow" if slow else self._line)
        self._since += self._queue.now() - asked
        self.has_slot = True
        self._ticks = self._tick_bytes = 0
        self._wait_a_tick()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While it is the other side's turn to move."""
        if self._queue.is_slow(self._identity):
            self.release()
        self._is_waiting = True
        try:
            yield
        finally:
            self._is_waiting = False

    def moved(self, count: int) -> None:
        self._bytes += count
        self._tick_bytes += count
        if self._queue.now() - self._since >= TICK_SECONDS:
            self.judge()

    def judge(self) -> None:
        """Whether the transfer has been fast since it was last judged; who was slow may be so no more."""
        now = self._queue.now()
        enough = TICK_BYTES * (now - self._since) / TICK_SECONDS
        if self._bytes and self._bytes >= enough:
            self._queue.mark(self._identity, slow=False)
        self._since, self._bytes = now, 0

    def release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.has_slot:
            self.has_slot = False
            self._queue.leave(self._identity)

    def _wait_a_tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self._ticks += 1
        stalled = self._is_waiting and self._tick_bytes < TICK_BYTES
        self._tick_bytes = 0
        if stalled:
            self._queue.mark(self._identity, slow=True)
        if stalled or self._ticks >= SLICE_TICKS:
            self.release()
        else:
            self._wait_a_tick()
