"""Who has yet to hear that a run is over."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.connections import Connection, Connections

LONGEST_SECONDS = 60.0
"""A server that ends waits no longer for clients that come back and are cut off again."""


class Farewells:
    """The last word on a run, for each of its clients that is not known to have it yet.

    A client that confirms has it once it says so: until then it is told on every stream that it opens. Of any
    other it is enough that the event was sent.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._untold: dict[str, pb.Event] = {}
        self._told = 0.0
        """When a stream was last told, by the steady clock."""

    def owe(self, client_ids: Iterable[str], event: pb.Event) -> None:
        """These are to hear of it, and who was told of the run and did not get into it; whoever was to hear
        of an earlier run no longer is."""
        run_id = event.run_ended.run_id
        told = [each.client.client_id for each in self._connections.open() if each.described == run_id]
        self._untold = dict.fromkeys([*client_ids, *told], event)

    def tell(self, connection: Connection) -> None:
        """Nothing if the client has heard it, or was not in the run."""
        client_id = connection.client.client_id
        if (event := self._untold.get(client_id)) is None:
            return
        if not connection.confirms:
            del self._untold[client_id]
        connection.send(event)
        self._told = time.monotonic()
        # A run that is given more rounds later is new to the client.
        connection.described = None

    def tell_connected(self) -> None:
        for connection in self._connections.open():
            self.tell(connection)

    def heard(self, client_id: str, run_id: str) -> None:
        """The client says so."""
        event = self._untold.get(client_id)
        if event is not None and event.run_ended.run_id == run_id:
            del self._untold[client_id]
            self._connections.changed.ring()

    async def all_told(self, seconds: float) -> None:
        """Until everyone has heard it, or no stream was told for so long; LONGEST_SECONDS at most."""
        changed, begun = self._connections.changed, time.monotonic()
        while self._untold:
            end = min(max(begun, self._told) + seconds, begun + LONGEST_SECONDS)
            if (left := end - time.monotonic()) <= 0:
                return
            await changed.wait(changed.count, left)
