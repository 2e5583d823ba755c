"""Every durable fact of the server, as methods in the words of the domain. Each is one transaction.

What a method returned has happened for good: SQLite and PostgreSQL both flush to disk before they say so.
Recovery after a crash is reading these facts again. Methods block and may be called from any thread.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    Row,
    Select,
    and_,
    case,
    delete,
    func,
    insert,
    select,
    update,
)

from fedmpq.exchange.messages import Phase
from fedmpq.method.state import ClientRecord
from fedmpq.server.database import clients, members, open_database, rounds, runs, tokens, writing
from fedmpq.server.database import seats as seats_table
from fedmpq.server.tokens import TokenRecord

RunState = Literal["waiting", "running", "paused", "finished", "aborted"]
SeatState = Literal["selected", "updated", "rejected", "cut"]
ENDED: tuple[RunState, ...] = ("finished", "aborted")


class StoreError(ValueError):
    """A request that the stored facts do not allow."""


class TokenRefused(StoreError):
    """An enrolment token that is unknown, revoked, expired or used up."""


class NameTaken(StoreError):
    """An enrolment under a name that another client has."""


class UpdateRefused(StoreError):
    """An update for a round that is over, or from a client that is not in it."""


class UnknownRun(StoreError):
    """No run of that id or name."""


@dataclass(frozen=True)
class Client:
    """A board that has enrolled."""

    client_id: str
    name: str
    secret_hash: bytes
    certificate_name: str | None
    budget: float
    samples: int
    version: str
    engine: str
    created: float
    first_seen: float | None
    revoked: float | None


@dataclass(frozen=True)
class Run:
    sequence: int
    run_id: str
    name: str
    config: dict[str, Any]
    class_names: tuple[str, ...]
    state: RunState
    reason: str
    graph: bytes
    """Hash of the graph's blob."""
    model: bytes
    """Hash of the blob that holds the weights and side tensors after `round` rounds."""
    bit_widths: tuple[int, ...] | None
    round: int
    ready: int
    """The last round whose model can be handed out, with statistics if any are to be measured; 0: none."""
    bytes_up: int
    bytes_down: int
    created: float
    ended: float | None


@dataclass(frozen=True)
class Member:
    """A client in a run."""

    client: int
    client_id: str
    budget: float
    samples: int
    dealt: tuple[int, ...] | None
    returned: tuple[int, ...] | None
    strikes: int
    accuracy: float | None
    bytes_up: int
    bytes_down: int

    @property
    def record(self) -> ClientRecord:
        return ClientRecord(self.client, self.budget, self.samples, self.dealt, self.returned)


@dataclass(frozen=True)
class Seat:
    """A client's place in a round."""

    client: int
    state: SeatState
    reason: str
    bit_widths: tuple[int, ...]
    payload: bytes
    payload_bytes: int
    update: bytes | None = None
    update_bytes: int | None = None
    receipt_id: str | None = None


@dataclass(frozen=True)
class NewSeat:
    """Who is to train or measure what; budget and samples are what the client said when it was dealt to."""

    client: int
    budget: float
    samples: int
    bit_widths: tuple[int, ...]
    payload: bytes
    payload_bytes: int


@dataclass(frozen=True)
class Round:
    """A round's training, or the calibration of the model it made."""

    run_id: str
    round: int
    phase: Phase
    state: Literal["open", "committed"]
    target: int
    opened: float
    deadline: float | None
    extended: int
    metrics: dict[str, Any] | None
    model: bytes | None
    seats: tuple[Seat, ...]
    """In the order of client numbers."""


@dataclass(frozen=True)
class Joining:
    """A client that enters a run under the number `client`."""

    client: int
    client_id: str
    budget: float
    samples: int


@dataclass(frozen=True)
class RoundCommit:
    """What a merged round comes to."""

    round: int
    last: bool
    """Whether the run ends with it; not if a calibration is to follow."""
    ready: bool
    """Whether the model can be handed out; not without the calibration that the run has measured for it."""
    model: bytes
    """Hash of the new global model's blob."""
    bit_widths: tuple[int, ...]
    records: Sequence[ClientRecord]
    """Of the clients that were in the round."""
    accuracies: Mapping[int, float]
    bytes_up: Mapping[int, int]
    bytes_down: Mapping[int, int]
    metrics: Mapping[str, Any]
    keep_models: int
    """How many rounds' models stay, this one's included."""


@dataclass(frozen=True)
class CalibrationCommit:
    """What the calibration of a merged round comes to."""

    round: int
    last: bool
    """Whether the run ends with it."""
    model: bytes
    """Hash of the blob of the same model with its new statistics."""
    accuracies: Mapping[int, float]
    bytes_up: Mapping[int, int]
    bytes_down: Mapping[int, int]
    metrics: Mapping[str, Any]
    """The round's, with what the calibration adds to them."""
    keep_models: int
    """As of a RoundCommit."""


class Store:
    """The facts in one database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # SQLite lets one writer in and has the others sleep and try again; a lock wakes them at once.
        self._lock = threading.Lock()

    @classmethod
    def open(cls, url: str) -> Store:
        return cls(open_database(url))

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        with self._lock, writing(self._engine) as connection:
            yield connection

    # Tokens and clients

    def add_token(self, token: TokenRecord) -> None:
        with self._write() as connection:
            connection.execute(
                insert(tokens).values(
                    token_id=token.token_id,
                    token_hash=token.digest,
                    client_name=token.client_name,
                    uses_left=token.uses_left,
                    expires=None if token.expires is None else token.expires.timestamp(),
                    revoked=token.created.timestamp() if token.revoked else None,
                    created=token.created.timestamp(),
                )
            )

    def revoke_token(self, token_id: str, now: float) -> bool:
        """No one can enrol with it any more; those who did stay. False: there is no such token."""
        with self._write() as connection:
            changed = connection.execute(
                update(tokens)
                .where(tokens.c.token_id == token_id)
                .values(revoked=func.coalesce(tokens.c.revoked, now))
            )
        return changed.rowcount == 1

    def list_tokens(self) -> list[TokenRecord]:
        """The oldest first."""
        with self._engine.begin() as connection:
            rows = connection.execute(select(tokens).order_by(tokens.c.created, tokens.c.token_id)).all()
        return [_token(row) for row in rows]

    def enrol(
        self,
        token_hash: bytes,
        name: str,
        budget: float,
        version: str,
        secret_hash: bytes,
        certificate_name: str | None,
        now: float,
    ) -> str:
        """The id of a new client, at the cost of one use of the token.

        The same token and name again, before any call with the identity given, replaces that identity's
        secret and costs nothing: the answer was lost on its way.
        """
        with self._write() as connection:
            row = connection.execute(select(tokens).where(tokens.c.token_hash == token_hash)).one_or_none()
            if row is None:
                raise TokenRefused("no such enrolment token; ask the operator for another")
            token, known = _token(row), self._unrevoked(connection, name)
            lost_answer = known is not None and known.token_id == token.token_id and known.first_seen is None
            # The use that a lost answer cost is the use it repeats.
            spare = replace(token, uses_left=None) if lost_answer else token
            if (refusal := spare.refusal(name, _moment(now))) is not None:
                raise TokenRefused(f"{refusal}; ask the operator for another")
            facts = {
                "budget": budget,
                "version": version,
                "secret_hash": secret_hash,
                "certificate_name": certificate_name,
            }
            if known is not None:
                if not lost_answer:
                    raise NameTaken(
                        f"a client named {name!r} is enrolled; choose another name, "
                        f"or have the operator revoke it first (fedmpq server revoke {name})"
                    )
                connection.execute(
                    update(clients).where(clients.c.client_id == known.client_id).values(**facts)
                )
                return str(known.client_id)
            self._use_token(connection, token)
            client_id = uuid.uuid4().hex
            fixed = {"client_id": client_id, "name": name, "token_id": token.token_id, "created": now}
            connection.execute(insert(clients).values(samples=0, engine="", **fixed, **facts))
        return client_id

    @staticmethod
    def _unrevoked(connection: Connection, name: str) -> Row[Any] | None:
        named = select(clients).where(clients.c.name == name, clients.c.revoked.is_(None))
        return connection.execute(named).one_or_none()

    @staticmethod
    def _use_token(connection: Connection, token: TokenRecord) -> None:
        if token.uses_left is None:
            return
        used = connection.execute(
            update(tokens)
            .where(tokens.c.token_id == token.token_id, tokens.c.uses_left > 0)
            .values(uses_left=tokens.c.uses_left - 1)
        )
        if used.rowcount != 1:
            raise TokenRefused("the token is used up; ask the operator for another")

    def client_by_id(self, client_id: str) -> Client | None:
        """A client that may call: None if there is none of this id, or it was revoked."""
        with self._engine.begin() as connection:
            row = connection.execute(
                select(clients).where(clients.c.client_id == client_id, clients.c.revoked.is_(None))
            ).one_or_none()
        return None if row is None else _client(row)

    def unrevoked(self, client_ids: Collection[str]) -> set[str]:
        """Those of the clients that may still call."""
        chosen = select(clients.c.client_id).where(
            clients.c.client_id.in_(client_ids), clients.c.revoked.is_(None)
        )
        with self._engine.begin() as connection:
            return set(connection.execute(chosen).scalars())

    def list_clients(self, *, revoked: bool = False) -> list[Client]:
        """By name; the revoked ones too if asked for."""
        chosen = select(clients).order_by(clients.c.name, clients.c.created)
        if not revoked:
            chosen = chosen.where(clients.c.revoked.is_(None))
        with self._engine.begin() as connection:
            return [_client(row) for row in connection.execute(chosen)]

    def revoke_client(self, name: str, now: float) -> str | None:
        """Ends an identity and frees its name; its id, or None if no client has this name."""
        with self._write() as connection:
            known = self._unrevoked(connection, name)
            if known is None:
                return None
            connection.execute(
                update(clients).where(clients.c.client_id == known.client_id).values(revoked=now)
            )
        return str(known.client_id)

    def mark_seen(self, client_id: str, now: float) -> None:
        """The client has used its identity: the enrolment is complete."""
        with self._write() as connection:
            connection.execute(
                update(clients)
                .where(clients.c.client_id == client_id, clients.c.first_seen.is_(None))
                .values(first_seen=now)
            )

    def describe_client(
        self, client_id: str, budget: float, samples: int, version: str, engine: str, now: float
    ) -> None:
        """What the client says of itself on a new stream; nothing is written if it is as before."""
        said = {"budget": budget, "samples": samples, "version": version, "engine": engine}
        this = clients.c.client_id == client_id
        with self._engine.begin() as connection:
            known = connection.execute(select(clients).where(this)).one()
        if known.first_seen is not None and all(
            getattr(known, name) == value for name, value in said.items()
        ):
            return
        with self._write() as connection:
            connection.execute(
                update(clients)
                .where(this)
                .values(first_seen=func.coalesce(clients.c.first_seen, now), **said)
            )

    # Runs

    def queue_run(
        self,
        name: str,
        config: Mapping[str, Any],
        class_names: Sequence[str],
        graph: bytes,
        model: bytes,
        now: float,
    ) -> Run:
        """A run that waits for its turn; `graph` and `model` are hashes of blobs that are durable already."""
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
        return self.run(run_id)

    def run(self, run_id: str) -> Run:
        found = self._runs(select(runs).where(runs.c.run_id == run_id))
        if not found:
            raise UnknownRun(f"there is no run {run_id!r}; fedmpq runs lists them")
        return found[0]

    def run_by_name(self, name: str) -> Run | None:
        found = self._runs(select(runs).where(runs.c.name == name))
        return found[0] if found else None

    def list_runs(self) -> list[Run]:
        """The newest first."""
        return self._runs(select(runs).order_by(runs.c.sequence.desc()))

    def next_run(self) -> Run | None:
        """The oldest run that has not ended: the one at work, or the next."""
        waiting = select(runs).where(runs.c.state.not_in(ENDED)).order_by(runs.c.sequence).limit(1)
        found = self._runs(waiting)
        return found[0] if found else None

    def last_ended(self) -> Run | None:
        """The run that ended last."""
        over = select(runs).where(runs.c.ended.is_not(None)).order_by(runs.c.ended.desc()).limit(1)
        found = self._runs(over)
        return found[0] if found else None

    def _runs(self, chosen: Select[Any]) -> list[Run]:
        with self._engine.begin() as connection:
            return [_run(row) for row in connection.execute(chosen)]

    def pause_run(self, run_id: str) -> Run:
        return self._change_run(
            run_id, ("waiting", "running"), state="paused", reason="paused by the operator"
        )

    def resume_run(self, run_id: str) -> Run:
        """Back to where it was paused."""
        running = case((runs.c.bit_widths.is_(None), "waiting"), else_="running")
        return self._change_run(run_id, ("paused",), state=running, reason="")

    def abort_run(self, run_id: str, reason: str, now: float) -> Run:
        """Ends a run; what was merged stays."""
        active: tuple[RunState, ...] = ("waiting", "running", "paused")
        return self._change_run(run_id, active, state="aborted", reason=reason, ended=now)

    def _change_run(self, run_id: str, allowed: Sequence[RunState], **values: Any) -> Run:
        with self._write() as connection:
            changed = connection.execute(
                update(runs).where(runs.c.run_id == run_id, runs.c.state.in_(allowed)).values(**values)
            )
        run = self.run(run_id)
        if changed.rowcount != 1:
            raise StoreError(f"run {run.name!r} is {run.state}; it must be {' or '.join(allowed)} for that")
        return run

    def latest_part(self, client_id: str) -> tuple[Run, int] | None:
        """The newest run with a model to hand out that the client is in, and its number there."""
        chosen = (
            select(members.c.run_id, members.c.client)
            .join(runs, runs.c.run_id == members.c.run_id)
            .where(members.c.client_id == client_id, runs.c.ready >= 1)
            .order_by(runs.c.sequence.desc())
            .limit(1)
        )
        with self._engine.begin() as connection:
            row = connection.execute(chosen).one_or_none()
        return None if row is None else (self.run(row.run_id), row.client)

    def members(self, run_id: str) -> list[Member]:
        """In the order of their numbers."""
        chosen = select(members).where(members.c.run_id == run_id).order_by(members.c.client)
        with self._engine.begin() as connection:
            return [_member(row) for row in connection.execute(chosen)]

    # Rounds

    def open_round(
        self,
        run_id: str,
        number: int,
        *,
        target: int,
        deadline: float | None,
        bit_widths: Sequence[int],
        joining: Iterable[Joining],
        seats: Sequence[NewSeat],
        now: float,
    ) -> Round:
        """Round `number` begins: who is in it, with which bit-widths.

        Clients that join the run get numbers. `bit_widths` are the run's; its first round gives it some.
        """
        with self._write() as connection:
            begun = connection.execute(
                update(runs)
                .where(
                    runs.c.run_id == run_id,
                    runs.c.round == number - 1,
                    runs.c.state.in_(("waiting", "running")),
                )
                .values(state="running", reason="", bit_widths=bytes(bit_widths))
            )
            if begun.rowcount != 1:
                raise StoreError(f"round {number} of run {run_id} cannot open: the run has moved on")
            _open(connection, _Address(run_id, number), target, deadline, now)
            return _seated(connection, _Address(run_id, number), joining, seats)

    def open_calibration(
        self, run_id: str, number: int, *, deadline: float | None, seats: Sequence[NewSeat], now: float
    ) -> Round:
        """The calibration of round `number`, the last one merged, begins: who measures which model."""
        address = _Address(run_id, number, "calibration")
        with self._write() as connection:
            due = select(runs.c.run_id).where(
                runs.c.run_id == run_id,
                runs.c.round == number,
                runs.c.ready < number,
                runs.c.state == "running",
            )
            if connection.execute(due).one_or_none() is None:
                raise StoreError(
                    f"the calibration of round {number} of run {run_id} cannot open: it is not due"
                )
            _open(connection, address, len(seats), deadline, now)
            return _seated(connection, address, (), seats)

    def reopen_round(
        self,
        run_id: str,
        number: int,
        phase: Phase = "training",
        *,
        deadline: float | None,
        extended: bool,
        cut: Iterable[int],
        joining: Iterable[Joining],
        seats: Sequence[NewSeat],
    ) -> Round:
        """The open round goes on with others: `cut` leave it, `seats` enter it, perhaps a second time."""
        address = _Address(run_id, number, phase)
        with self._write() as connection:
            changed = connection.execute(
                update(rounds)
                .where(address.is_open)
                .values(deadline=deadline, extended=rounds.c.extended + int(extended))
            )
            if changed.rowcount != 1:
                raise StoreError(f"{address} is not open")
            _cut(connection, address, "the deadline passed", cut)
            for seat in seats:
                connection.execute(
                    delete(seats_table).where(address.is_seat(seat.client), seats_table.c.state == "cut")
                )
            return _seated(connection, address, joining, seats)

    def close_round(self, run_id: str, number: int, reason: str, phase: Phase = "training") -> Round:
        """From here on the round takes no update; those who have not answered are cut.

        The updates it has are those to merge.
        """
        address = _Address(run_id, number, phase)
        with self._write() as connection:
            waiting = select(seats_table.c.client).where(address.has_seat, seats_table.c.state == "selected")
            _cut(connection, address, reason, connection.execute(waiting).scalars().all())
            return _read_round(connection, address)

    def current_round(self, run_id: str) -> Round | None:
        """The round or calibration that is open, if one is."""
        with self._engine.begin() as connection:
            row = connection.execute(
                select(rounds.c.round, rounds.c.phase).where(
                    rounds.c.run_id == run_id, rounds.c.state == "open"
                )
            ).one_or_none()
            return None if row is None else _read_round(connection, _Address(run_id, row.round, row.phase))

    def round(self, run_id: str, number: int, phase: Phase = "training") -> Round | None:
        address = _Address(run_id, number, phase)
        with self._engine.begin() as connection:
            if connection.execute(select(rounds.c.round).where(address.is_round)).one_or_none() is None:
                return None
            return _read_round(connection, address)

    def seat_of(self, run_id: str, number: int, client_id: str, phase: Phase = "training") -> Seat | None:
        """The client's place in a round, open or not."""
        chosen = (
            select(seats_table)
            .join(
                members,
                (members.c.run_id == seats_table.c.run_id) & (members.c.client == seats_table.c.client),
            )
            .where(_Address(run_id, number, phase).has_seat, members.c.client_id == client_id)
        )
        with self._engine.begin() as connection:
            row = connection.execute(chosen).one_or_none()
        return None if row is None else _stored_seat(row)

    def add_update(
        self,
        run_id: str,
        number: int,
        client: int,
        update_hash: bytes,
        update_bytes: int,
        phase: Phase = "training",
    ) -> str:
        """The receipt of an update or calibration whose blob is durable; the same one for the same again."""
        address = _Address(run_id, number, phase)
        with self._write() as connection:
            receipt_id = uuid.uuid4().hex
            taken = connection.execute(
                update(seats_table)
                .where(
                    address.is_seat(client),
                    seats_table.c.state == "selected",
                    select(rounds.c.round).where(address.is_open).exists(),
                    select(runs.c.run_id).where(runs.c.run_id == run_id, runs.c.state != "aborted").exists(),
                )
                .values(state="updated", update=update_hash, update_bytes=update_bytes, receipt_id=receipt_id)
            )
            if taken.rowcount == 1:
                return receipt_id
            row = connection.execute(select(seats_table).where(address.is_seat(client))).one_or_none()
        if row is not None and row.state == "updated" and row.update == update_hash:
            return str(row.receipt_id)
        state = "has no place for this client" if row is None else f"has this client {row.state}"
        raise UpdateRefused(f"round {number} takes no more of this client: it is over or {state}")

    def reject_update(
        self, run_id: str, number: int, client: int, reason: str, phase: Phase = "training"
    ) -> bool:
        """What the client sent was bad: it is out of this round and has a strike. False: it was out."""
        with self._write() as connection:
            changed = connection.execute(
                update(seats_table)
                .where(_Address(run_id, number, phase).is_seat(client), seats_table.c.state == "selected")
                .values(state="rejected", reason=reason)
            )
            if changed.rowcount == 1:
                connection.execute(
                    update(members)
                    .where(members.c.run_id == run_id, members.c.client == client)
                    .values(strikes=members.c.strikes + 1)
                )
        return changed.rowcount == 1

    def commit_round(self, run_id: str, result: RoundCommit, now: float) -> Run:
        """The round is merged: the new model, bit-widths, client records and metrics, all or nothing."""
        with self._write() as connection:
            closed = connection.execute(
                update(rounds)
                .where(_Address(run_id, result.round).is_open)
                .values(
                    state="committed",
                    metrics=json.dumps(result.metrics, allow_nan=False),
                    model=result.model,
                )
            )
            if closed.rowcount != 1:
                raise StoreError(f"round {result.round} of run {run_id} is not open")
            _commit_members(connection, run_id, result)
            ready = {"ready": result.round} if result.ready else {}
            widths = bytes(result.bit_widths)
            address = _Address(run_id, result.round)
            _move_run(connection, address, result, now, round=result.round, bit_widths=widths, **ready)
        return self.run(run_id)

    def commit_calibration(self, run_id: str, result: CalibrationCommit, now: float) -> Run:
        """The round's model has its statistics: model, metrics and perhaps the run's end, all or nothing."""
        address = _Address(run_id, result.round, "calibration")
        with self._write() as connection:
            closed = connection.execute(update(rounds).where(address.is_open).values(state="committed"))
            if closed.rowcount != 1:
                raise StoreError(f"{address} is not open")
            metrics = json.dumps(result.metrics, allow_nan=False)
            connection.execute(
                update(rounds)
                .where(_Address(run_id, result.round).is_round)
                .values(metrics=metrics, model=result.model)
            )
            _commit_measured(connection, run_id, result)
            _move_run(connection, address, result, now, ready=result.round)
        return self.run(run_id)

    def blobs_in_use(self) -> set[bytes]:
        """Hashes of all blobs that a stored fact refers to; the others may go."""
        open_updates = (
            select(seats_table.c.update)
            .join(
                rounds,
                (rounds.c.run_id == seats_table.c.run_id)
                & (rounds.c.round == seats_table.c.round)
                & (rounds.c.phase == seats_table.c.phase),
            )
            .join(runs, runs.c.run_id == rounds.c.run_id)
            .where(rounds.c.state == "open", runs.c.state.not_in(ENDED), seats_table.c.update.is_not(None))
        )
        with self._engine.begin() as connection:
            used = set(connection.execute(select(runs.c.graph)).scalars())
            used |= set(connection.execute(select(runs.c.model)).scalars())
            used |= set(
                connection.execute(select(rounds.c.model).where(rounds.c.model.is_not(None))).scalars()
            )
            return used | set(connection.execute(open_updates).scalars())


@dataclass(frozen=True)
class _Address:
    """Which round of which run, and which phase of it."""

    run_id: str
    round: int
    phase: Phase = "training"

    def __str__(self) -> str:
        what = "round" if self.phase == "training" else "the calibration of round"
        return f"{what} {self.round} of run {self.run_id}"

    @property
    def is_round(self) -> ColumnElement[bool]:
        this = rounds.c.run_id == self.run_id, rounds.c.round == self.round
        return and_(*this, rounds.c.phase == self.phase)

    @property
    def is_open(self) -> ColumnElement[bool]:
        return and_(self.is_round, rounds.c.state == "open")

    @property
    def has_seat(self) -> ColumnElement[bool]:
        this = seats_table.c.run_id == self.run_id, seats_table.c.round == self.round
        return and_(*this, seats_table.c.phase == self.phase)

    def is_seat(self, client: int) -> ColumnElement[bool]:
        return and_(self.has_seat, seats_table.c.client == client)


def _open(connection: Connection, address: _Address, target: int, deadline: float | None, now: float) -> None:
    connection.execute(
        insert(rounds).values(
            run_id=address.run_id,
            round=address.round,
            phase=address.phase,
            state="open",
            target=target,
            opened=now,
            deadline=deadline,
            extended=0,
        )
    )


def _seated(
    connection: Connection, address: _Address, joining: Iterable[Joining], seats: Sequence[NewSeat]
) -> Round:
    """The round with these clients in it as well."""
    run_id = address.run_id
    new_members = [
        {
            "run_id": run_id,
            "client": one.client,
            "client_id": one.client_id,
            "budget": one.budget,
            "samples": one.samples,
            "strikes": 0,
            "bytes_up": 0,
            "bytes_down": 0,
        }
        for one in joining
    ]
    if new_members:
        connection.execute(insert(members), new_members)
    for seat in seats:
        connection.execute(
            update(members)
            .where(members.c.run_id == run_id, members.c.client == seat.client)
            .values(budget=seat.budget, samples=seat.samples)
        )
    new_seats = [
        {
            "run_id": run_id,
            "round": address.round,
            "phase": address.phase,
            "client": seat.client,
            "state": "selected",
            "reason": "",
            "bit_widths": bytes(seat.bit_widths),
            "payload": seat.payload,
            "payload_bytes": seat.payload_bytes,
        }
        for seat in seats
    ]
    if new_seats:
        connection.execute(insert(seats_table), new_seats)
    return _read_round(connection, address)


def _cut(connection: Connection, address: _Address, reason: str, cut: Iterable[int]) -> None:
    for client in cut:
        connection.execute(
            update(seats_table)
            .where(address.is_seat(client), seats_table.c.state == "selected")
            .values(state="cut", reason=reason)
        )


def _commit_members(connection: Connection, run_id: str, result: RoundCommit) -> None:
    for record in result.records:
        values: dict[str, Any] = {
            "dealt": _as_bytes(record.dealt),
            "returned": _as_bytes(record.returned),
            "bytes_up": members.c.bytes_up + result.bytes_up.get(record.client, 0),
            "bytes_down": members.c.bytes_down + result.bytes_down.get(record.client, 0),
        }
        if record.client in result.accuracies:
            values["accuracy"] = result.accuracies[record.client]
        connection.execute(
            update(members)
            .where(members.c.run_id == run_id, members.c.client == record.client)
            .values(**values)
        )


def _move_run(
    connection: Connection,
    address: _Address,
    result: RoundCommit | CalibrationCommit,
    now: float,
    **changes: int | bytes,
) -> None:
    """The run has the new model and the bytes it cost, and perhaps its end; older models go."""
    moved: dict[str, Any] = {"model": result.model, **changes}
    moved["bytes_up"] = runs.c.bytes_up + sum(result.bytes_up.values())
    moved["bytes_down"] = runs.c.bytes_down + sum(result.bytes_down.values())
    if result.last:
        moved |= {"state": "finished", "reason": "", "ended": now}
    alive = and_(runs.c.run_id == address.run_id, runs.c.state.not_in(ENDED))
    if connection.execute(update(runs).where(alive).values(**moved)).rowcount != 1:
        raise StoreError(f"run {address.run_id} has ended; {address} cannot be committed")
    _forget_models(connection, address.run_id, result.round - result.keep_models)


def _forget_models(connection: Connection, run_id: str, newest: int) -> None:
    """The models of round `newest` and before go, but for the one that is handed out."""
    ready = select(runs.c.ready).where(runs.c.run_id == run_id).scalar_subquery()
    old = and_(rounds.c.run_id == run_id, rounds.c.round <= newest, rounds.c.round != ready)
    connection.execute(update(rounds).where(old).values(model=None))


def _commit_measured(connection: Connection, run_id: str, result: CalibrationCommit) -> None:
    for client in result.accuracies.keys() | result.bytes_up.keys() | result.bytes_down.keys():
        values: dict[str, Any] = {
            "bytes_up": members.c.bytes_up + result.bytes_up.get(client, 0),
            "bytes_down": members.c.bytes_down + result.bytes_down.get(client, 0),
        }
        if client in result.accuracies:
            values["accuracy"] = result.accuracies[client]
        connection.execute(
            update(members).where(members.c.run_id == run_id, members.c.client == client).values(**values)
        )


def _read_round(connection: Connection, address: _Address) -> Round:
    row = connection.execute(select(rounds).where(address.is_round)).one()
    seated = connection.execute(select(seats_table).where(address.has_seat).order_by(seats_table.c.client))
    return Round(
        run_id=address.run_id,
        round=address.round,
        phase=address.phase,
        state=row.state,
        target=row.target,
        opened=row.opened,
        deadline=row.deadline,
        extended=row.extended,
        metrics=None if row.metrics is None else json.loads(row.metrics),
        model=row.model,
        seats=tuple(_stored_seat(seat) for seat in seated),
    )


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def _token(row: Row[Any]) -> TokenRecord:
    return TokenRecord(
        token_id=row.token_id,
        digest=row.token_hash,
        created=_moment(row.created),
        uses_left=row.uses_left,
        expires=None if row.expires is None else _moment(row.expires),
        client_name=row.client_name,
        revoked=row.revoked is not None,
    )


def _client(row: Row[Any]) -> Client:
    return Client(
        client_id=row.client_id,
        name=row.name,
        secret_hash=row.secret_hash,
        certificate_name=row.certificate_name,
        budget=row.budget,
        samples=row.samples,
        version=row.version,
        engine=row.engine,
        created=row.created,
        first_seen=row.first_seen,
        revoked=row.revoked,
    )


def _run(row: Row[Any]) -> Run:
    return Run(
        sequence=row.sequence,
        run_id=row.run_id,
        name=row.name,
        config=json.loads(row.config),
        class_names=tuple(json.loads(row.class_names)),
        state=row.state,
        reason=row.reason,
        graph=row.graph,
        model=row.model,
        bit_widths=_as_widths(row.bit_widths),
        round=row.round,
        ready=row.ready,
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
        created=row.created,
        ended=row.ended,
    )


def _member(row: Row[Any]) -> Member:
    return Member(
        client=row.client,
        client_id=row.client_id,
        budget=row.budget,
        samples=row.samples,
        dealt=_as_widths(row.dealt),
        returned=_as_widths(row.returned),
        strikes=row.strikes,
        accuracy=row.accuracy,
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
    )


def _stored_seat(row: Row[Any]) -> Seat:
    return Seat(
        client=row.client,
        state=row.state,
        reason=row.reason,
        bit_widths=tuple(row.bit_widths),
        payload=row.payload,
        payload_bytes=row.payload_bytes,
        update=row.update,
        update_bytes=row.update_bytes,
        receipt_id=row.receipt_id,
    )


def _as_widths(data: bytes | None) -> tuple[int, ...] | None:
    return None if data is None else tuple(data)


def _as_bytes(widths: tuple[int, ...] | None) -> bytes | None:
    return None if widths is None else bytes(widths)
