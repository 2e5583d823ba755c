"""Who has yet to hear that a run is over."""

from __future__ import annotations

import time
from collections.abc import Iterable

from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.connections import Connection, Connections


class Farewells:
    """The last word on a run, for each of its clients that has not got it yet."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._untold: dict[str, pb.Event] = {}

    def owe(self, client_ids: Iterable[str], event: pb.Event) -> None:
        """These are to hear of it, and who was told of the run and did not get into it; whoever was to hear
        of an earlier run no longer is."""
        run_id = event.run_ended.run_id
        told = [each.client.client_id for each in self._connections.open() if each.described == run_id]
        self._untold = dict.fromkeys([*client_ids, *told], event)

    def tell(self, connection: Connection) -> None:
        """Nothing if the client has heard it, or was not in the run."""
        if (event := self._untold.pop(connection.client.client_id, None)) is not None:
            connection.send(event)
            # A run that is given more rounds later is new to the client.
            connection.described = None

    def tell_connected(self) -> None:
        for client in self._connections.connected():
            if (connection := self._connections.get(client.client_id)) is not None:
                self.tell(connection)

    async def all_told(self, seconds: float) -> None:
        """Until everyone has heard it, but no longer than this."""
        changed, end = self._connections.changed, time.monotonic() + seconds
        while self._untold and (left := end - time.monotonic()) > 0:
            await changed.wait(changed.count, left)
