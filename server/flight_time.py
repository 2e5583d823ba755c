"""How long each board has been at work, where merges are asynchronous: longer than from one to the next."""

from __future__ import annotations

from collections.abc import Collection

from fedmpq.server.round_time import Clock, RoundTime
from fedmpq.server.store.records import OpenedRound


class FlightTime(RoundTime):
    """The time of one merge, which has no deadline, and of the boards that are at work for it.

    It is counted by this process alone: after a restart every board has all of its time once more.
    """

    def __init__(self, wall: Clock, steady: Clock, stored: OpenedRound, *, new: bool) -> None:
        super().__init__(wall, steady, stored, 0.0, new=new)
        waiting = {seat.client for seat in stored.seats_in("selected")}
        self._unknown = set() if new else waiting
        """Clients that were given their places in the time of an earlier process."""

    def go_on(self, wall: Clock, stored: OpenedRound) -> FlightTime:
        """The time of the next merge, for which some are at work already."""
        following = FlightTime(wall, self._steady, stored, new=True)
        at_work = {seat.client for seat in stored.seats_in("selected")}
        following._placed = {client: self._since_of(client) for client in at_work}
        following._unknown = self._unknown & at_work
        return following

    def placed(self, client: int) -> None:
        super().placed(client)
        self._unknown.discard(client)

    def answered(self, client: int) -> None:
        if client not in self._unknown:
            super().answered(client)

    def at_work(self, client: int) -> float:
        """Seconds for which this process has waited for the client."""
        return self._steady() - self._since_of(client)

    def late(self, clients: Collection[int], seconds: float) -> set[int]:
        """Those of the clients that have been at work for longer; 0 seconds: nobody."""
        return {client for client in clients if 0 < seconds <= self.at_work(client)}

    def _since_of(self, client: int) -> float:
        return self._placed.get(client, self._since)
