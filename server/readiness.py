"""Which connected clients are ready for a run: those that have read their data in its form, and old ones.

A client that answers hears of the run as soon as both are there. It says Ready, or it declines and why, and
is chosen for rounds only after the first.
"""

from __future__ import annotations

import logging

from fedmpq.server.active_run import ActiveRun
from fedmpq.server.connections import Connection, Connections
from fedmpq.server.round_events import run_described
from fedmpq.server.store.records import Client
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")


def describe(connection: Connection, active: ActiveRun) -> None:
    """Tell the client of the run, once on each stream; it answers this one, whatever it declined before."""
    run_id = active.run.run_id
    if connection.described == run_id:
        return
    if connection.answers:
        connection.declined = ""
    connection.send(run_described(active))
    connection.described = run_id


def describe_to_all(connections: Connections, active: ActiveRun) -> None:
    """Tell every client that answers."""
    for connection in connections.open():
        if connection.answers:
            describe(connection, active)


def mark_ready(connections: Connections, client: Client, run_id: str) -> None:
    """The client has its data for the run, and so many samples as it describes itself with now."""
    if (connection := connections.get(client.client_id)) is not None:
        connection.client, connection.ready_for = client, run_id
        connection.declined = ""
        connections.changed.ring()


def mark_declined(connections: Connections, client_id: str, reason: str) -> None:
    """The client cannot take part in rounds on this stream."""
    if (connection := connections.get(client_id)) is not None:
        if connection.declined != reason:
            name = connection.client.name
            say(log, "client cannot take part", level=logging.WARNING, client=name, reason=reason)
        connection.declined = reason
        connections.changed.ring()


def is_ready(connection: Connection | None, active: ActiveRun) -> bool:
    """Whether a client may be chosen: it can take part, and has its data for this run if it says so."""
    if connection is None or connection.declined:
        return False
    if not connection.answers:
        # An old client does not know that there is a range, and would make other codes.
        return active.config.data_range is None
    return connection.ready_for == active.run.run_id


def prepares(connection: Connection | None, active: ActiveRun, seconds: float) -> bool:
    """Whether a connected client has neither answered nor had so many seconds for it yet."""
    if connection is None or connection.declined or is_ready(connection, active):
        return False
    return connection.age < seconds
