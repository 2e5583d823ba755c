"""The store in a database: a SQLite file, or PostgreSQL by URL."""

from __future__ import annotations

from sqlalchemy import and_, select

from fedmpq.server.database import open_database, rounds, runs, seats
from fedmpq.server.store.answers import SqlAnswers
from fedmpq.server.store.enrolment import SqlEnrolment
from fedmpq.server.store.failed_merges import SqlFailedMerges
from fedmpq.server.store.leadership import SqlLeadership
from fedmpq.server.store.own_facts import SqlOwnFacts
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import ENDED
from fedmpq.server.store.releases import SqlReleases
from fedmpq.server.store.rounds import SqlRounds
from fedmpq.server.store.runs import SqlRuns
from fedmpq.server.store.sightings import SqlSightings


class SqlStore(
    SqlEnrolment,
    SqlRuns,
    SqlRounds,
    SqlAnswers,
    SqlFailedMerges,
    SqlReleases,
    SqlSightings,
    SqlLeadership,
    SqlOwnFacts,
):
    """`Store` in one database."""

    def close(self) -> None:
        self._engine.dispose()

    def blobs_in_use(self) -> set[bytes]:
        open_answers = (
            select(seats.c.update)
            .join(
                rounds,
                and_(
                    rounds.c.run_id == seats.c.run_id,
                    rounds.c.round == seats.c.round,
                    rounds.c.phase == seats.c.phase,
                ),
            )
            .join(runs, runs.c.run_id == rounds.c.run_id)
            .where(rounds.c.state == "open", runs.c.state.not_in(ENDED), seats.c.state == "updated")
        )
        kept_models = select(rounds.c.model).where(rounds.c.model.is_not(None))
        used: set[bytes] = set()
        with self._read() as connection:
            for chosen in (select(runs.c.graph), select(runs.c.model), kept_models, open_answers):
                used |= set(connection.execute(chosen).scalars())
        return used


def open_store(url: str) -> Store:
    """Connect, and bring the tables to this version."""
    return SqlStore(open_database(url))
