"""Front-ends, the boards at them and pieces of uploads, in SQL.

Nothing here asks who leads: a front-end writes of itself alone, and what it says of a board holds until a
newer stream of that board is noted, by whichever front-end has it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, and_, bindparam, delete, insert, select, update

from fedmpq.server.front_tables import forwarded, front_ends, presence, upload_parts
from fedmpq.server.store.dialects import dialect_insert
from fedmpq.server.store.leadership import clock_of
from fedmpq.server.store.records import Forwarded, FrontEnd, Present, UploadPart
from fedmpq.server.store.transactions import Transactions

_MINE = update(presence).where(
    presence.c.client_id == bindparam("of_client"), presence.c.front_id == bindparam("of_front")
)
_LEAVE = _MINE.values(here=False, version=bindparam("new_version"))
_CHANGE = _MINE.values(
    here=bindparam("is_here"), said=bindparam("new_said"), version=bindparam("new_version")
)


class SqlFronts(Transactions):
    """`Fronts` in a database."""

    def beat(self, front_id: str, address: str, seconds: float) -> bool:
        with self._own_write() as connection:
            expires = clock_of(connection) + seconds
            known = update(front_ends).where(front_ends.c.front_id == front_id).values(expires=expires)
            if connection.execute(known).rowcount == 0:
                new = {"front_id": front_id, "address": address, "expires": expires, "version": 0}
                connection.execute(insert(front_ends).values(**new))
                return True
        return False

    def front_ends(self) -> list[FrontEnd]:
        with self._read() as connection:
            left = (front_ends.c.expires - clock_of(connection)).label("left")
            rows = connection.execute(select(front_ends, left).order_by(front_ends.c.front_id)).all()
        return [FrontEnd(row.front_id, row.address, row.version, row.left) for row in rows]

    def note_presence(
        self, front_id: str, come: Sequence[Present], changed: Sequence[Present], gone: Collection[str]
    ) -> None:
        with self._own_write() as connection:
            version = _next_version(connection, front_id)
            if come:
                _put_all(connection, front_id, version, come)
            # In one order for all, so that two front-ends that had the same boards do not wait in a ring.
            rows = [
                {"of_client": one.client_id, "is_here": one.here, "new_said": json.dumps(one.said)}
                for one in sorted(changed, key=lambda one: one.client_id)
            ]
            this = {"of_front": front_id, "new_version": version}
            if rows:
                connection.execute(_CHANGE, [row | this for row in rows])
            if gone:
                connection.execute(_LEAVE, [{"of_client": one} | this for one in sorted(gone)])

    def presence(self, front_id: str, since: int) -> list[Present]:
        chosen = select(presence).where(presence.c.front_id == front_id, presence.c.version > since)
        with self._read() as connection:
            rows = connection.execute(chosen.order_by(presence.c.version, presence.c.client_id)).all()
        return [Present(row.client_id, row.here, json.loads(row.said)) for row in rows]

    def boards_at(self, front_id: str) -> set[str]:
        chosen = select(presence.c.client_id).where(
            presence.c.front_id == front_id, presence.c.here.is_(True)
        )
        with self._read() as connection:
            return set(connection.execute(chosen).scalars())

    def remove_front(self, front_id: str) -> None:
        with self._own_write() as connection:
            connection.execute(delete(presence).where(presence.c.front_id == front_id))
            connection.execute(delete(front_ends).where(front_ends.c.front_id == front_id))

    def forward(self, one: Forwarded) -> None:
        with self._own_write() as connection:
            connection.execute(
                insert(forwarded).values(
                    client_id=one.client_id, ready_for=one.ready_for, declined=one.declined
                )
            )

    def take_forwarded(self, front_id: str) -> list[Forwarded]:
        mine = select(presence.c.client_id).where(presence.c.front_id == front_id)
        chosen = select(forwarded).where(forwarded.c.client_id.in_(mine)).order_by(forwarded.c.sequence)
        with self._read() as connection:
            rows = connection.execute(chosen).all()
        if rows:
            taken = [row.sequence for row in rows]
            with self._own_write() as connection:
                connection.execute(delete(forwarded).where(forwarded.c.sequence.in_(taken)))
        return [Forwarded(row.client_id, row.ready_for, row.declined) for row in rows]

    # Pieces of uploads

    def upload_parts(self, client_id: str, payload: bytes) -> list[UploadPart]:
        chosen = select(upload_parts).where(
            upload_parts.c.client_id == client_id, upload_parts.c.payload == payload
        )
        with self._read() as connection:
            rows = connection.execute(chosen.order_by(upload_parts.c.start)).all()
        found: list[UploadPart] = []
        for row in rows:
            if row.start == (found[-1].end if found else 0):
                found.append(UploadPart(row.start, row.size, row.blob))
        return found

    def add_upload_part(self, client_id: str, payload: bytes, part: UploadPart) -> None:
        row: dict[str, Any] = {"client_id": client_id, "payload": payload}
        row |= {"start": part.start, "size": part.size, "blob": part.blob}
        with self._own_write() as connection:
            # Another front-end may have the same piece, sent twice; either will do.
            new = dialect_insert(connection)(upload_parts).values(**row)
            connection.execute(new.on_conflict_do_nothing())

    def forget_upload(self, client_id: str, payload: bytes, beyond: int = 0) -> None:
        these = and_(upload_parts.c.client_id == client_id, upload_parts.c.payload == payload)
        with self._own_write() as connection:
            connection.execute(
                delete(upload_parts).where(these, upload_parts.c.start + upload_parts.c.size > beyond)
            )

    def forget_other_uploads(self, client_id: str, payload: bytes) -> None:
        others = and_(upload_parts.c.client_id == client_id, upload_parts.c.payload != payload)
        with self._own_write() as connection:
            connection.execute(delete(upload_parts).where(others))

    def keep_uploads_of(self, client_ids: Collection[str]) -> None:
        with self._write() as connection:
            senders = set(connection.execute(select(upload_parts.c.client_id).distinct()).scalars())
            for sender in sorted(senders.difference(client_ids)):
                connection.execute(delete(upload_parts).where(upload_parts.c.client_id == sender))


def _next_version(connection: Connection, front_id: str) -> int:
    """The row stays locked until the transaction is over, so versions are committed in their order."""
    this = front_ends.c.front_id == front_id
    known = select(front_ends.c.version).where(this).with_for_update()
    version = (connection.execute(known).scalar() or 0) + 1
    connection.execute(update(front_ends).where(this).values(version=version))
    return version


def _put_all(connection: Connection, front_id: str, version: int, present: Sequence[Present]) -> None:
    rows = [
        {
            "client_id": one.client_id,
            "front_id": front_id,
            "version": version,
            "here": True,
            "said": json.dumps(one.said),
        }
        for one in sorted(present, key=lambda one: one.client_id)
    ]
    new = dialect_insert(connection)(presence)
    fresh = {name: new.excluded[name] for name in ("front_id", "version", "here", "said")}
    connection.execute(new.on_conflict_do_update(index_elements=["client_id"], set_=fresh), rows)
