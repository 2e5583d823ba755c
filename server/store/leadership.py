"""Which of the servers on one database leads, in SQL: a lease with a number that grows, the epoch.

Whoever leads renews the lease. Who finds it over takes it, under the next epoch, and from then on no
transaction of an earlier epoch can write (`Transactions`): a server that was paused and wakes up after its
lease is refused, whatever it was about to do. Times are the database's, so the servers' clocks do not matter.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Double,
    Row,
    cast,
    func,
    insert,
    literal_column,
    select,
    update,
)

from fedmpq.server.database import leadership
from fedmpq.server.store.errors import Deposed
from fedmpq.server.store.records import Leader
from fedmpq.server.store.transactions import Transactions


class SqlLeadership(Transactions):
    """`Leadership` in a database."""

    def lead(self, holder: str, seconds: float) -> int | None:
        with self._own_write() as connection:
            known = _row(connection, locked=True)
            now = connection.execute(select(clock_of(connection))).scalar_one()
            if known is not None and known.holder != holder and known.expires > now:
                return None
            values = {
                "holder": holder,
                "epoch": 1 if known is None else known.epoch + 1,
                "expires": now + seconds,
            }
            if known is None:
                connection.execute(insert(leadership).values(seat=0, **values))
            else:
                connection.execute(update(leadership).values(values))
        self.epoch = int(values["epoch"])
        return self.epoch

    def renew(self, seconds: float) -> None:
        with self._own_write() as connection:
            self._let_expire(connection, clock_of(connection) + seconds)

    def step_down(self) -> None:
        with self._own_write() as connection:
            self._let_expire(connection, 0.0)
        self.epoch = None

    def leader(self) -> Leader | None:
        with self._read() as connection:
            known = _row(connection)
            if known is None:
                return None
            left = known.expires - connection.execute(select(clock_of(connection))).scalar_one()
        return Leader(known.holder, known.epoch, left)

    def _let_expire(self, connection: Connection, moment: float | ColumnElement[float]) -> None:
        own = update(leadership).where(leadership.c.epoch == self.epoch).values(expires=moment)
        if not connection.execute(own).rowcount:
            raise Deposed(self.epoch or 0)


def _row(connection: Connection, *, locked: bool = False) -> Row[Any] | None:
    chosen = select(leadership)
    return connection.execute(chosen.with_for_update() if locked else chosen).one_or_none()


def clock_of(connection: Connection) -> ColumnElement[float]:
    """The database's clock, in seconds since 1970."""
    if connection.dialect.name == "sqlite":
        return (func.julianday("now") - literal_column("2440587.5")) * literal_column("86400.0")
    return cast(func.extract("epoch", func.clock_timestamp()), Double)
