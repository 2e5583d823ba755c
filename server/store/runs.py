"""Runs and who is in them, in SQL."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, case, insert, select, update

from fedmpq.server.database import members, runs
from fedmpq.server.store.errors import StoreError, UnknownRun
from fedmpq.server.store.records import ENDED, Member, Run, RunState
from fedmpq.server.store.rows import member_of, run_of
from fedmpq.server.store.transactions import Transactions

BY_OPERATOR = "paused by the operator"


class SqlRuns(Transactions):
    """`Runs` in a database."""

    def queue_run(
        self,
        name: str,
        config: Mapping[str, Any],
        class_names: Sequence[str],
        graph: bytes,
        model: bytes,
        now: float,
    ) -> Run:
        run_id = uuid.uuid4().hex
        with self._write() as connection:
            connection.execute(
                insert(runs).values(
                    run_id=run_id,
                    name=name,
                    config=json.dumps(config, allow_nan=False),
                    class_names=json.dumps(list(class_names)),
                    state="waiting",
                    reason="",
                    graph=graph,
                    model=model,
                    round=0,
                    ready=0,
                    bytes_up=0,
                    bytes_down=0,
                    created=now,
                )
            )
            return read_run(connection, run_id)

    def run(self, run_id: str) -> Run:
        with self._read() as connection:
            return read_run(connection, run_id)

    def run_by_name(self, name: str) -> Run | None:
        return self._first(select(runs).where(runs.c.name == name))

    def list_runs(self) -> list[Run]:
        with self._read() as connection:
            return [run_of(row) for row in connection.execute(select(runs).order_by(runs.c.sequence.desc()))]

    def next_run(self) -> Run | None:
        return self._first(select(runs).where(runs.c.state.not_in(ENDED)).order_by(runs.c.sequence))

    def last_ended(self) -> Run | None:
        return self._first(select(runs).where(runs.c.ended.is_not(None)).order_by(runs.c.ended.desc()))

    def _first(self, chosen: Select[Any]) -> Run | None:
        with self._read() as connection:
            row = connection.execute(chosen.limit(1)).one_or_none()
        return None if row is None else run_of(row)

    def pause_run(self, run_id: str, reason: str = BY_OPERATOR) -> Run:
        allowed: tuple[RunState, ...] = ("waiting", "running")
        if reason != BY_OPERATOR:
            allowed = (*allowed, "paused")
        return self._change_run(run_id, allowed, state="paused", reason=reason)

    def resume_run(self, run_id: str) -> Run:
        running = case((runs.c.bit_widths.is_(None), "waiting"), else_="running")
        return self._change_run(run_id, ("paused",), state=running, reason="")

    def abort_run(self, run_id: str, reason: str, now: float) -> Run:
        active: tuple[RunState, ...] = ("waiting", "running", "paused")
        return self._change_run(run_id, active, state="aborted", reason=reason, ended=now)

    def _change_run(self, run_id: str, allowed: Sequence[RunState], **values: Any) -> Run:
        with self._write() as connection:
            changed = connection.execute(
                update(runs).where(runs.c.run_id == run_id, runs.c.state.in_(allowed)).values(**values)
            )
            run = read_run(connection, run_id)
        if changed.rowcount != 1:
            raise StoreError(f"run {run.name!r} is {run.state}; it must be {' or '.join(allowed)} for that")
        return run

    def configure_run(self, run_id: str, known: Mapping[str, Any], config: Mapping[str, Any]) -> Run:
        with self._write() as connection:
            run = read_run(connection, run_id)
            if run.config != known or run.state == "aborted":
                raise StoreError(f"run {run.name!r} has changed meanwhile; try again")
            values: dict[str, Any] = {"config": json.dumps(config, allow_nan=False)}
            if run.state == "finished" and config["rounds"] > run.round:
                values |= {"state": "running", "reason": "", "ended": None}
            connection.execute(update(runs).where(runs.c.run_id == run_id).values(**values))
            return read_run(connection, run_id)

    def members(self, run_id: str) -> list[Member]:
        chosen = select(members).where(members.c.run_id == run_id).order_by(members.c.client)
        with self._read() as connection:
            return [member_of(row) for row in connection.execute(chosen)]

    def latest_part(self, client_id: str) -> tuple[Run, int] | None:
        chosen = (
            select(members.c.run_id, members.c.client)
            .join(runs, runs.c.run_id == members.c.run_id)
            .where(members.c.client_id == client_id, runs.c.ready >= 1)
            .order_by(runs.c.sequence.desc())
            .limit(1)
        )
        with self._read() as connection:
            row = connection.execute(chosen).one_or_none()
            return None if row is None else (read_run(connection, row.run_id), row.client)


def read_run(connection: Connection, run_id: str) -> Run:
    row = connection.execute(select(runs).where(runs.c.run_id == run_id)).one_or_none()
    if row is None:
        raise UnknownRun(f"there is no run {run_id!r}; fedmpq runs lists them")
    return run_of(row)
