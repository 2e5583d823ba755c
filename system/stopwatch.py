"""Where the seconds of some work go."""

from __future__ import annotations

import time


class Stopwatch:
    """Seconds by phase; each phase lasts from the end of the one before."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.seconds: dict[str, float] = {}

    def end(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._began
        self._began = now
