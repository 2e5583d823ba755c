"""What all pages see now: looked at once for all of them, only while somebody does, and never for long.

A look takes a thread and the server's time. After each one at least `LEAST_SECONDS` pass, and where it took
long so many more that looking takes no more than one part in `SHARE` of the time; but `MOST_SECONDS` at most,
for on a busy machine most of what a look takes is waiting.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence

from fedmpq.dashboard.places import Facts, Place

LEAST_SECONDS = 1.0
MOST_SECONDS = 5.0
SHARE = 100


class Watch:
    """`version` grows whenever what is seen has changed."""

    def __init__(self, places: Sequence[Place], steady: Callable[[], float] = time.monotonic) -> None:
        self._places = places
        self._steady = steady
        self._turn = asyncio.Lock()
        self._due = 0.0
        self.version = 0
        self.text = ""
        """All places as JSON, as they were seen last."""

    async def newest(self) -> str:
        """As it is now, or was a moment ago."""
        async with self._turn:
            if self._steady() >= self._due:
                await self._look()
        return self.text

    async def changed(self, seen: int, seconds: float) -> bool:
        """Waits until `version` is no longer `seen`; False: so many seconds have passed before."""
        end = self._steady() + seconds
        while True:
            await self.newest()
            if self.version != seen:
                return True
            if self._steady() >= end:
                return False
            await asyncio.sleep(max(0.0, min(self._due, end) - self._steady()))

    def look_at_once(self) -> None:
        """Something was done just now: the next look is due."""
        self._due = 0.0

    async def _look(self) -> None:
        began = self._steady()
        places = [await asyncio.to_thread(_seen, place) for place in self._places]
        text = json.dumps({"places": places})
        if text != self.text:
            self.text, self.version = text, self.version + 1
        took = self._steady() - began
        self._due = began + min(max(LEAST_SECONDS, SHARE * took), MOST_SECONDS)


def _seen(place: Place) -> Facts:
    """A place that cannot be read says why; the others are shown all the same."""
    try:
        return place.look()
    except (OSError, RuntimeError, ValueError) as error:
        empty: Facts = {"kind": "", "path": "", "running": False, "disk": None, "runs": [], "boards": []}
        return {**empty, "key": place.key, "note": str(error)}
