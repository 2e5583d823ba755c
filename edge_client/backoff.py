"""How long to wait before the next try.

Full jitter: after n failures in a row a pause is uniform in 0..min(most, least * 2^n). A server that comes
back meets its clients spread over the whole interval instead of all at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable

_MOST_DOUBLINGS = 64


class BackoffError(ValueError):
    """Lengths of pauses that make no sense."""


class Backoff:
    """Pauses in seconds that grow with failures; `uniform` gives numbers in [0, 1)."""

    def __init__(self, least: float, most: float, uniform: Callable[[], float] = random.random) -> None:
        if not 0 < least <= most < float("inf"):
            raise BackoffError(
                f"pauses of {least:g} to {most:g} seconds between tries make no sense; "
                "--retry-least must be above 0 and at most --retry-most"
            )
        self.least = least
        self.most = most
        self._uniform = uniform
        self._failures = 0

    def pause(self) -> float:
        """Counts a failure and says how many seconds to wait after it."""
        longest = min(self.most, self.least * 2.0 ** min(self._failures, _MOST_DOUBLINGS))
        self._failures += 1
        return longest * self._uniform()

    def reset(self) -> None:
        """Something went well: the next pause is a short one again."""
        self._failures = 0

    def fresh(self) -> Backoff:
        """A new one with the same settings that has counted no failures."""
        return Backoff(self.least, self.most, self._uniform)
