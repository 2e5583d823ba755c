"""Who of a round's clients may still answer, who could take a free place, and who is worth waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace

from fedmpq.server.active_run import MAX_STRIKES, ActiveRun
from fedmpq.server.claim_limits import ClaimLimits
from fedmpq.server.connections import Connections
from fedmpq.server.readiness import is_ready, prepares
from fedmpq.server.resources import Resources
from fedmpq.server.store.records import LEFT, Client, OpenedRound

RETURN_SECONDS = 60.0
"""After this long without a board coming back, those that come back at all have: a client's pauses between
two tries to connect are no longer."""


@dataclass(frozen=True)
class Standing:
    """How an open round stands."""

    answered: int
    awaited: int
    """Places whose clients are connected, or have not been away for long."""
    gone: tuple[int, ...]
    """Clients that have a place and were away for longer than the round waits for anyone."""
    away: int
    """Places whose clients are not connected, gone or not."""

    @property
    def pending(self) -> int:
        return self.awaited + len(self.gone)


def standing(stored: OpenedRound, active: ActiveRun, connections: Connections, grace: float) -> Standing:
    """`grace` is how many seconds a client may be disconnected before it is gone."""
    pending = [seat.client for seat in stored.seats_in("selected")]
    away = {client: connections.away(active.client_id(client)) for client in pending}
    gone = tuple(client for client in pending if away[client] >= grace)
    absent = sum(seconds > 0 for seconds in away.values())
    return Standing(len(stored.answers()), len(pending) - len(gone), gone, absent)


async def selectable(resources: Resources, active: ActiveRun) -> list[Client]:
    """Connected clients that may be selected; the streams of those revoked meanwhile end."""
    connected = resources.connections.connected()
    if not connected:
        return []
    allowed = await unrevoked(resources, [client.client_id for client in connected])
    # As they are now: one that has said meanwhile that it is ready has said with how many samples, too.
    connections = resources.connections
    able = [one for one in connections.connected() if is_ready(connections.get(one.client_id), active)]
    # A limit may have been set since the client connected.
    limited = [replace(one, limits=allowed[one.client_id]) for one in able if one.client_id in allowed]
    return [client for client in limited if active.may_train(client)]


async def unrevoked(resources: Resources, client_ids: Iterable[str]) -> dict[str, ClaimLimits]:
    """Those of the clients that may still call, with their limits; the streams of the others end."""
    ids = list(client_ids)
    if not ids:
        return {}
    allowed = await asyncio.to_thread(resources.store.unrevoked, ids)
    for client_id in set(ids) - allowed.keys():
        if (connection := resources.connections.get(client_id)) is not None:
            connection.close("revoked")
    return allowed


async def spares(resources: Resources, active: ActiveRun, stored: OpenedRound) -> list[Client]:
    """Connected clients that have no place in the round, or lost it."""
    return without_place(await selectable(resources, active), active, stored)


def without_place(ready: list[Client], active: ActiveRun, stored: OpenedRound) -> list[Client]:
    """Those of the clients that have no place in the round, or lost it."""
    taken = _taken(active, stored)
    return [one for one in ready if one.client_id not in taken]


async def spares_may_come(resources: Resources, active: ActiveRun, stored: OpenedRound) -> bool:
    """Whether a client of the run without a place has not been away for long and may take one."""
    taken, grace = _taken(active, stored), active.config.away_seconds
    return await _expects(resources, active, taken, grace)


async def may_begin(resources: Resources, active: ActiveRun, ready: list[Client]) -> bool:
    """Whether a round begins with those who are ready: because they are enough, or because the fleet of a run
    that has begun is smaller now.

    It does not if `min_clients` says how many must be there. Else the run waits for each of its clients that
    was not away for long yet, and until nobody has come back for a while.
    """
    config = active.config
    if len(ready) >= config.least_clients:
        return True
    if config.min_clients is not None or not ready:
        return False
    # Those who have said that they cannot take part are not waited for, nor those whom the run does not take.
    connected = resources.connections.open()
    unable = sum(bool(each.declined) or not active.may_train(each.client) for each in connected)
    if len(ready) + unable >= config.least_clients:
        return True
    if not active.members:
        return False
    if resources.connections.quiet < min(RETURN_SECONDS, config.away_seconds):
        return False
    here = {client.client_id for client in ready}
    return not await _expects(resources, active, here, config.grace)


def _taken(active: ActiveRun, stored: OpenedRound) -> set[str]:
    return {active.client_id(seat.client) for seat in stored.seats if seat.state not in LEFT}


async def _expects(resources: Resources, active: ActiveRun, but: set[str], grace: float) -> bool:
    """Whether clients of the run are not connected or not ready but may be soon."""

    def may_come(client_id: str) -> bool:
        connections = resources.connections
        return 0 < connections.away(client_id) < grace or prepares(connections.get(client_id), active, grace)

    awaited = [
        member.client_id
        for member in active.members.values()
        if member.client_id not in but and member.strikes < MAX_STRIKES and may_come(member.client_id)
    ]
    return bool(await unrevoked(resources, awaited))
