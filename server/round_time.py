"""How long a round has been open and how long it still waits.

Within a process the steady clock counts, which never jumps. The wall clock is only asked after a restart, for
the time that passed while no process counted, and is believed only where what it says is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedmpq.server.store.records import OpenedRound

Clock = Callable[[], float]
MOST_AGE = 30 * 86400.0
"""A round without a deadline that seems to be older than this was opened under another clock."""


@dataclass(frozen=True)
class Timing:
    """What is known of a round's time when it is merged."""

    elapsed: float
    """Seconds from its opening."""
    slowest: float | None
    """Seconds from the time its sender was given a place to the last answer that was in time; None if there
    was no answer, or if the round outlived a process and the time is not known well enough."""


def time_left(deadline: float | None, now: float, whole: float) -> float | None:
    """Seconds that a stored round still waits, of `whole` that a round has; None: as long as it takes.

    `deadline` and `now` are of the wall clock. If what is left is not in 0 < left <= whole, the clock jumped,
    or the server was away until the deadline had passed and no board could deliver: then the boards get the
    whole time once more.
    """
    if whole <= 0:
        return None
    if deadline is None or not 0 < deadline - now <= whole:
        return whole
    return deadline - now


class RoundTime:
    """The time of one open round, as this process counts it."""

    def __init__(self, wall: Clock, steady: Clock, stored: OpenedRound, whole: float, *, new: bool) -> None:
        self._steady = steady
        self._since = now = steady()
        age = wall() - stored.opened
        self._began = now - (age if 0 <= age <= (whole or MOST_AGE) else 0.0)
        self._ends: float | None = None
        self.is_new = new
        """Whether this process opened the round, and so knows all of its time."""
        self._placed: dict[int, float] = {}
        self._slowest: float | None = None
        self.restart(time_left(stored.deadline, wall(), whole))

    @property
    def elapsed(self) -> float:
        """Seconds since the round opened."""
        return self._steady() - self._began

    @property
    def waited(self) -> float:
        """Seconds for which this process has waited for the round's clients."""
        return self._steady() - self._since

    @property
    def left(self) -> float | None:
        """Seconds until the round is late, 0 if it is; None: it never is."""
        return None if self._ends is None else max(0.0, self._ends - self._steady())

    @property
    def is_late(self) -> bool:
        return self.left == 0.0

    def restart(self, seconds: float | None) -> None:
        """The round waits for so many seconds from now on; None: as long as it takes."""
        self._ends = None if seconds is None else self._steady() + seconds

    def placed(self, client: int) -> None:
        """The client got its place now, not when the round opened."""
        self._placed[client] = self._steady()

    def answered(self, client: int) -> None:
        """The client's answer was accepted."""
        if self.is_new:
            took = self._steady() - self._placed.get(client, self._began)
            self._slowest = max(took, self._slowest or 0.0)

    def timing(self) -> Timing:
        return Timing(self.elapsed, self._slowest)
