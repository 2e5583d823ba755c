"""Tokens and clients, in SQL."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

from sqlalchemy import Connection, Row, and_, bindparam, func, insert, select, update

from fedmpq.server.claim_limits import ClaimLimits
from fedmpq.server.database import clients, tokens
from fedmpq.server.store.errors import NameTaken, TokenRefused, UnknownToken
from fedmpq.server.store.records import Client, Described
from fedmpq.server.store.rows import client_of, moment, token_of
from fedmpq.server.store.transactions import Transactions
from fedmpq.server.tokens import TokenRecord

_AT_ONCE = 10_000
"""Ids in one statement: SQLite takes 32,766 parameters by default, PostgreSQL 65,535."""


class SqlEnrolment(Transactions):
    """`Enrolment` in a database."""

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
                    **asdict(token.limits),
                )
            )

    def revoke_token(self, token_id: str, now: float) -> bool:
        with self._write() as connection:
            changed = connection.execute(
                update(tokens)
                .where(tokens.c.token_id == token_id)
                .values(revoked=func.coalesce(tokens.c.revoked, now))
            )
        return changed.rowcount == 1

    def list_tokens(self) -> list[TokenRecord]:
        with self._read() as connection:
            rows = connection.execute(select(tokens).order_by(tokens.c.created, tokens.c.token_id)).all()
        return [token_of(row) for row in rows]

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
        facts = {
            "budget": budget,
            "version": version,
            "secret_hash": secret_hash,
            "certificate_name": certificate_name,
        }
        with self._write() as connection:
            row = connection.execute(select(tokens).where(tokens.c.token_hash == token_hash)).one_or_none()
            if row is None:
                raise UnknownToken("no such enrolment token; ask the operator for another")
            token, known = token_of(row), _unrevoked(connection, name)
            lost_answer = known is not None and known.token_id == token.token_id and known.first_seen is None
            # The use that a lost answer cost is the use it repeats.
            spare = replace(token, uses_left=None) if lost_answer else token
            if (refusal := spare.refusal(name, moment(now))) is not None:
                raise TokenRefused(f"{refusal}; ask the operator for another")
            if known is None:
                _use_token(connection, token)
                return _add_client(connection, name, token.token_id, facts | asdict(token.limits), now)
            if not lost_answer:
                raise NameTaken(
                    f"a client named {name!r} is enrolled; choose another name, "
                    f"or have the operator revoke it first (fedmpq server revoke {name})"
                )
            connection.execute(update(clients).where(clients.c.client_id == known.client_id).values(**facts))
            return str(known.client_id)

    def client_by_id(self, client_id: str) -> Client | None:
        return self.clients_by_id([client_id]).get(client_id)

    def clients_by_id(self, client_ids: Collection[str]) -> dict[str, Client]:
        chosen = select(clients).where(clients.c.client_id.in_(client_ids), clients.c.revoked.is_(None))
        with self._read() as connection:
            return {row.client_id: client_of(row) for row in connection.execute(chosen)}

    def unrevoked(self, client_ids: Collection[str]) -> dict[str, ClaimLimits]:
        ids = list(client_ids)
        found: dict[str, ClaimLimits] = {}
        columns = select(clients.c.client_id, clients.c.max_samples, clients.c.max_budget)
        with self._read() as connection:
            for start in range(0, len(ids), _AT_ONCE):
                some = clients.c.client_id.in_(ids[start : start + _AT_ONCE])
                rows = connection.execute(columns.where(some, clients.c.revoked.is_(None)))
                found |= {client: ClaimLimits(*limits) for client, *limits in rows}
        return found

    def limit_client(self, name: str, limits: ClaimLimits) -> bool:
        named = (clients.c.name == name, clients.c.revoked.is_(None))
        with self._write() as connection:
            changed = connection.execute(update(clients).where(*named).values(**asdict(limits)))
        return changed.rowcount == 1

    def rename_client(self, name: str, wanted: str) -> bool:
        with self._write() as connection:
            known = _unrevoked(connection, name)
            if known is None:
                return False
            if name != wanted and _unrevoked(connection, wanted) is not None:
                raise NameTaken(f"a client named {wanted!r} is enrolled: choose another name")
            this = clients.c.client_id == known.client_id
            connection.execute(update(clients).where(this).values(name=wanted))
        return True

    def list_clients(self, *, revoked: bool = False) -> list[Client]:
        chosen = select(clients).order_by(clients.c.name, clients.c.created)
        if not revoked:
            chosen = chosen.where(clients.c.revoked.is_(None))
        with self._read() as connection:
            return [client_of(row) for row in connection.execute(chosen)]

    def revoke_client(self, name: str, now: float) -> str | None:
        with self._write() as connection:
            known = _unrevoked(connection, name)
            if known is None:
                return None
            connection.execute(
                update(clients).where(clients.c.client_id == known.client_id).values(revoked=now)
            )
        return str(known.client_id)

    def mark_seen(self, client_ids: Collection[str], now: float) -> None:
        new = and_(clients.c.client_id.in_(client_ids), clients.c.first_seen.is_(None))
        with self._write() as connection:
            connection.execute(update(clients).where(new).values(first_seen=now))

    def describe_clients(self, described: Sequence[Described], now: float) -> list[Client]:
        these = select(clients).where(clients.c.client_id.in_({one.client_id for one in described}))
        with self._read() as connection:
            known = {row.client_id: client_of(row) for row in connection.execute(these)}
        found, changed = [], {}
        for one in described:
            client = known[one.client_id]
            first_seen = now if client.first_seen is None else client.first_seen
            said = replace(client, **asdict(one), first_seen=first_seen)
            if said != client:
                known[one.client_id] = changed[one.client_id] = said
            found.append(said)
        if changed:
            rows = [
                {
                    "of_client": said.client_id,
                    "new_budget": said.budget,
                    "new_samples": said.samples,
                    "new_version": said.version,
                    "new_engine": said.engine,
                    "now": now,
                }
                for said in changed.values()
            ]
            with self._write() as connection:
                connection.execute(_DESCRIBE, rows)
        return found


_DESCRIBE = (
    update(clients)
    .where(clients.c.client_id == bindparam("of_client"))
    .values(
        budget=bindparam("new_budget"),
        samples=bindparam("new_samples"),
        version=bindparam("new_version"),
        engine=bindparam("new_engine"),
        first_seen=func.coalesce(clients.c.first_seen, bindparam("now")),
    )
)


def _unrevoked(connection: Connection, name: str) -> Row[Any] | None:
    named = select(clients).where(clients.c.name == name, clients.c.revoked.is_(None))
    return connection.execute(named).one_or_none()


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


def _add_client(connection: Connection, name: str, token_id: str, facts: dict[str, Any], now: float) -> str:
    client_id = uuid.uuid4().hex
    connection.execute(
        insert(clients).values(
            client_id=client_id, name=name, token_id=token_id, created=now, samples=0, engine="", **facts
        )
    )
    return client_id
