"""When each board was last connected, in SQL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from sqlalchemy import insert, select, update

from fedmpq.server.database import sightings
from fedmpq.server.store.records import Sighting
from fedmpq.server.store.transactions import Transactions


class SqlSightings(Transactions):
    """`Sightings` in a database."""

    def note_sightings(self, found: Iterable[Sighting]) -> None:
        with self._write() as connection:
            for one in found:
                known = update(sightings).where(sightings.c.client_id == one.client_id).values(asdict(one))
                if connection.execute(known).rowcount == 0:
                    connection.execute(insert(sightings).values(asdict(one)))

    def sightings(self) -> dict[str, Sighting]:
        with self._read() as connection:
            rows = connection.execute(select(sightings)).all()
        return {row.client_id: Sighting(**row._mapping) for row in rows}
