"""What a merged round or calibration adds to its run and to its clients, in SQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Connection, and_, bindparam, func, or_, select, update

from fedmpq.server.database import members, rounds, runs, seats
from fedmpq.server.store.errors import StoreError
from fedmpq.server.store.records import ENDED, Commit, RoundAddress


def add_to_members(
    connection: Connection, run_id: str, result: Commit, changes: Mapping[int, Mapping[str, Any]]
) -> None:
    """Bytes and accuracies of the clients in `changes`, and what else changes of each: one statement for all
    whose same columns change."""
    rows: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for client, others in changes.items():
        values = dict(others)
        if client in result.accuracies:
            values["accuracy"] = result.accuracies[client]
        row = {f"new_{name}": value for name, value in values.items()}
        row |= {"up": result.bytes_up.get(client, 0), "down": result.bytes_down.get(client, 0)}
        row |= {"of_run": run_id, "of_client": client}
        rows.setdefault(tuple(values), []).append(row)
    for names, some in rows.items():
        connection.execute(
            update(members)
            .where(members.c.run_id == bindparam("of_run"), members.c.client == bindparam("of_client"))
            .values(
                bytes_up=members.c.bytes_up + bindparam("up"),
                bytes_down=members.c.bytes_down + bindparam("down"),
                **{name: bindparam(f"new_{name}") for name in names},
            ),
            some,
        )


def add_to_run(
    connection: Connection, address: RoundAddress, result: Commit, moved: Mapping[str, Any], now: float
) -> None:
    """The new model, the bytes it cost, what else has `moved`, and perhaps the run's end; older models go."""
    values: dict[str, Any] = {
        **moved,
        "model": result.model,
        "bytes_up": runs.c.bytes_up + sum(result.bytes_up.values()),
        "bytes_down": runs.c.bytes_down + sum(result.bytes_down.values()),
    }
    if result.last:
        values |= {"state": "finished", "reason": "", "ended": now}
    alive = and_(runs.c.run_id == address.run_id, runs.c.state.not_in(ENDED))
    if connection.execute(update(runs).where(alive).values(**values)).rowcount != 1:
        raise StoreError(f"run {address.run_id} has ended; {address} cannot be committed")
    _forget_models(connection, address.run_id, result.round - result.keep_models)


def _forget_models(connection: Connection, run_id: str, newest: int) -> None:
    """The models of round `newest` and before go, but for the one that is handed out."""
    ready = select(runs.c.ready).where(runs.c.run_id == run_id).scalar_subquery()
    old = and_(rounds.c.run_id == run_id, rounds.c.round <= newest, rounds.c.round != ready)
    connection.execute(update(rounds).where(old).values(model=None))


def carry_over(connection: Connection, address: RoundAddress, merged: Collection[int], sent: bytes) -> None:
    """Whoever of the round is still at work, or has answered and is not among the merged, goes over to the
    next round, which is open. `sent` is the blob of the model that the round was opened with."""
    here = and_(
        seats.c.run_id == address.run_id, seats.c.round == address.number, seats.c.phase == address.phase
    )
    answered = select(seats.c.client).where(here, seats.c.state == "updated")
    later = set(connection.execute(answered).scalars()) - set(merged)
    connection.execute(
        update(seats)
        .where(here, or_(seats.c.state == "selected", seats.c.client.in_(later)))
        .values(round=address.number + 1, sent_model=func.coalesce(seats.c.sent_model, sent))
    )
