"""What a database knows of itself: which blobs it has put, under which id, and where; in SQL."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import delete, insert, select, update

from fedmpq.server.database import blobs, facts
from fedmpq.server.store.dialects import dialect_insert
from fedmpq.server.store.transactions import Transactions

_AT_ONCE = 500
"""Names in one statement; databases bound how many parameters one may have."""


class SqlOwnFacts(Transactions):
    """`OwnFacts` in a database."""

    def fact(self, name: str) -> str | None:
        with self._read() as connection:
            value: str | None = connection.execute(select(facts.c.value).where(facts.c.name == name)).scalar()
        return value

    def remember(self, **values: str) -> None:
        with self._write() as connection:
            for name, value in values.items():
                known = update(facts).where(facts.c.name == name).values(value=value)
                if connection.execute(known).rowcount == 0:
                    connection.execute(insert(facts).values(name=name, value=value))

    def record_blobs(self, names: Sequence[bytes]) -> None:
        with self._write() as connection:
            for start in range(0, len(names), _AT_ONCE):
                # Several front-ends may put the same one; in one order, so that none waits for another.
                some = [{"name": name} for name in sorted(set(names[start : start + _AT_ONCE]))]
                connection.execute(dialect_insert(connection)(blobs).on_conflict_do_nothing(), some)

    def recorded_blobs(self) -> set[bytes]:
        with self._read() as connection:
            return set(connection.execute(select(blobs.c.name)).scalars())

    def forget_blobs(self, names: Iterable[bytes]) -> None:
        gone = list(names)
        with self._write() as connection:
            for start in range(0, len(gone), _AT_ONCE):
                connection.execute(delete(blobs).where(blobs.c.name.in_(gone[start : start + _AT_ONCE])))
