"""The store in a database: a SQLite file, or PostgreSQL by URL."""

from __future__ import annotations

from sqlalchemy import and_, select

from fedmpq.server.database import join_database, open_database, rounds, runs, seats
from fedmpq.server.front_tables import upload_parts
from fedmpq.server.store.answers import SqlAnswers
from fedmpq.server.store.enrolment import SqlEnrolment
from fedmpq.server.store.failed_merges import SqlFailedMerges
from fedmpq.server.store.fronts import SqlFronts
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
    SqlFronts,
    SqlOwnFacts,
):
    """`Store` in one database."""

    def blobs_in_use(self) -> set[bytes]:
        in_open_rounds = (
            select(seats.c.update, seats.c.sent_model, seats.c.state)
            .join(
                rounds,
                and_(
                    rounds.c.run_id == seats.c.run_id,
                    rounds.c.round == seats.c.round,
                    rounds.c.phase == seats.c.phase,
                ),
            )
            .join(runs, runs.c.run_id == rounds.c.run_id)
            .where(rounds.c.state == "open", runs.c.state.not_in(ENDED))
        ).subquery()
        open_answers = select(in_open_rounds.c.update).where(in_open_rounds.c.state == "updated")
        sent_models = select(in_open_rounds.c.sent_model).where(in_open_rounds.c.sent_model.is_not(None))
        models = select(runs.c.model).union(
            select(rounds.c.model).where(rounds.c.model.is_not(None)), sent_models
        )
        pieces = select(upload_parts.c.blob)
        used: set[bytes] = set()
        with self._read() as connection:
            for chosen in (select(runs.c.graph), models, open_answers, pieces):
                used |= set(connection.execute(chosen).scalars())
        return used


def join_store(url: str) -> Store:
    """Connect to a database whose leader has brought its tables to this version; StoreFailed before that."""
    return SqlStore(join_database(url))


def open_store(url: str) -> Store:
    """Connect, and bring the tables to this version."""
    return SqlStore(open_database(url))
