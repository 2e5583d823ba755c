"""How often everybody is looked at: a look at a large fleet costs much, and everything that happens asks for
one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

REST_SHARE = 9.0
"""A rest is so many times as long as the look before it: looking takes a tenth of the time at most."""
MOST_REST = 0.5


class Pace:
    """Between two looks there is a rest, in which changes gather. With a few clients it is over at once."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, share: float = REST_SHARE) -> None:
        self._clock = clock
        self._share = share
        self._began = self._ended = clock()

    def begin(self) -> None:
        self._began = self._ended = self._clock()

    def end(self) -> None:
        self._ended = self._clock()

    @property
    def seconds(self) -> float:
        """Of the rest that is due after the last look."""
        return min(MOST_REST, self._share * (self._ended - self._began))

    async def rest(self) -> None:
        await asyncio.sleep(self.seconds)
