"""The tables, and how to open the database that holds them: a SQLite file, or PostgreSQL by URL.

Times are seconds since 1970, hashes 32 bytes, bit-width vectors one byte for each layer. Payloads are not
here but in `blobs`, under the hashes named here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Connection,
    Double,
    Engine,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
    inspect,
    text,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError

from fedmpq.server.store.errors import StoreFailed

SCHEMA_REVISION = "0010"
"""The newest migration; a database at it needs no look at the others."""
BUSY_SECONDS = 30.0
CONNECT_SECONDS = 10

metadata = MetaData()

tokens = Table(
    "tokens",
    metadata,
    Column("token_id", String(12), primary_key=True),
    Column("token_hash", LargeBinary, nullable=False, unique=True),
    # The only client that may enrol with it; NULL: any.
    Column("client_name", String(64)),
    # NULL: any number.
    Column("uses_left", Integer),
    # NULL: never.
    Column("expires", Double),
    Column("revoked", Double),
    Column("created", Double, nullable=False),
    # What clients that enrol with it may claim; NULL: anything.
    Column("max_samples", BigInteger),
    Column("max_budget", Double),
    CheckConstraint("uses_left >= 0", name="token_uses"),
)

clients = Table(
    "clients",
    metadata,
    Column("client_id", String(32), primary_key=True),
    Column("name", String(64), nullable=False),
    Column("token_id", String(12), ForeignKey("tokens.token_id"), nullable=False),
    Column("secret_hash", LargeBinary, nullable=False),
    # Common name of the certificate it enrolled with; NULL: it showed none.
    Column("certificate_name", Text),
    Column("budget", Double, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("version", Text, nullable=False),
    Column("engine", Text, nullable=False),
    Column("created", Double, nullable=False),
    # NULL until its first call: the answer to its enrolment may have been lost.
    Column("first_seen", Double),
    Column("revoked", Double),
    # What counts of its claims at most; NULL: all of it.
    Column("max_samples", BigInteger),
    Column("max_budget", Double),
)
# A revoked client's name is free again.
Index(
    "client_name",
    clients.c.name,
    unique=True,
    sqlite_where=clients.c.revoked.is_(None),
    postgresql_where=clients.c.revoked.is_(None),
)

# Who was connected when, with what it said then that nothing depends on.
sightings = Table(
    "sightings",
    metadata,
    Column("client_id", String(32), ForeignKey("clients.client_id"), primary_key=True),
    Column("last_seen", Double, nullable=False),
    # NULL: it showed no certificate.
    Column("certificate_ends", Double),
    # NULL: it did not say.
    Column("free_bytes", BigInteger),
)

runs = Table(
    "runs",
    metadata,
    # In the order they were queued, which is the order they run in.
    Column("sequence", Integer, primary_key=True),
    Column("run_id", String(32), nullable=False, unique=True),
    Column("name", String(128), nullable=False, unique=True),
    # Every setting, as JSON.
    Column("config", Text, nullable=False),
    Column("class_names", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("graph", LargeBinary, nullable=False),
    Column("model", LargeBinary, nullable=False),
    # Averaged bit-widths; NULL before the run has clients.
    Column("bit_widths", LargeBinary),
    # The last one merged.
    Column("round", Integer, nullable=False),
    # The last one whose model can be handed out, with its statistics where it is to have some; 0: none.
    Column("ready", Integer, nullable=False),
    Column("bytes_up", BigInteger, nullable=False),
    Column("bytes_down", BigInteger, nullable=False),
    Column("created", Double, nullable=False),
    Column("ended", Double),
)

members = Table(
    "members",
    metadata,
    Column("run_id", String(32), ForeignKey("runs.run_id"), primary_key=True),
    # Its number in the run.
    Column("client", Integer, primary_key=True, autoincrement=False),
    Column("client_id", String(32), ForeignKey("clients.client_id"), nullable=False),
    # As it was when last dealt to.
    Column("budget", Double, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("dealt", LargeBinary),
    Column("returned", LargeBinary),
    # Rejected updates.
    Column("strikes", Integer, nullable=False),
    Column("accuracy", Double),
    Column("bytes_up", BigInteger, nullable=False),
    Column("bytes_down", BigInteger, nullable=False),
    UniqueConstraint("run_id", "client_id", name="member_once"),
)

rounds = Table(
    "rounds",
    metadata,
    Column("run_id", String(32), ForeignKey("runs.run_id"), primary_key=True),
    Column("round", Integer, primary_key=True, autoincrement=False),
    # training; or calibration, in which clients measure the statistics of the model the training made.
    Column("phase", String(16), primary_key=True),
    Column("state", String(16), nullable=False),
    # Clients a whole round has; the quorum is a share of it.
    Column("target", Integer, nullable=False),
    Column("opened", Double, nullable=False),
    # NULL: none.
    Column("deadline", Double),
    # How often the deadline passed without a quorum.
    Column("extended", Integer, nullable=False),
    # How often its answers could not be merged and no sender of a bad one was found.
    Column("failures", Integer, nullable=False, server_default="0"),
    # What was measured, as JSON; NULL until it is merged. A calibration adds to its training's.
    Column("metrics", Text),
    # The global model this round made; NULL until then, when it was swept, and of a calibration.
    Column("model", LargeBinary),
    # All its seats, as store/history.py folds them; NULL while they are rows of their own.
    Column("folded_seats", LargeBinary),
)
# One open round to a run, whatever a bug in the server may try.
Index(
    "round_open",
    rounds.c.run_id,
    unique=True,
    sqlite_where=rounds.c.state == "open",
    postgresql_where=rounds.c.state == "open",
)

seats = Table(
    "seats",
    metadata,
    Column("run_id", String(32), primary_key=True),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("phase", String(16), primary_key=True),
    Column("client", Integer, primary_key=True, autoincrement=False),
    # selected, updated, rejected, cut or declined.
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    # What it was sent.
    Column("bit_widths", LargeBinary, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("payload_bytes", BigInteger, nullable=False),
    # What it gave back; NULL until it has.
    Column("update", LargeBinary),
    Column("update_bytes", BigInteger),
    Column("receipt_id", String(32)),
    # Which version of the model it was sent, where merges are asynchronous; NULL: that before its round.
    Column("version", Integer),
    # The blob of that version, once there is a newer one.
    Column("sent_model", LargeBinary),
    ForeignKeyConstraint(["run_id", "round", "phase"], ["rounds.run_id", "rounds.round", "rounds.phase"]),
    ForeignKeyConstraint(["run_id", "client"], ["members.run_id", "members.client"]),
)

# Answers that had a receipt and do not count, for good: what a seat says of itself changes with its round.
thrown_out = Table(
    "thrown_out",
    metadata,
    Column("sequence", Integer, primary_key=True),
    Column("run_id", String(32), nullable=False),
    Column("round", Integer, nullable=False),
    Column("phase", String(16), nullable=False),
    Column("client", Integer, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("receipt_id", String(32), nullable=False),
    Column("reason", Text, nullable=False),
    # Whether it counts against its sender.
    Column("struck", Boolean, nullable=False),
    Column("time", Double, nullable=False),
    ForeignKeyConstraint(["run_id", "client"], ["members.run_id", "members.client"]),
)

# Versions of models that boards are to run, numbered through all runs.
releases = Table(
    "releases",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("run_id", String(32), ForeignKey("runs.run_id"), nullable=False),
    Column("round", Integer, nullable=False),
    # SHA-256 of every verified file, in hex, by format; as JSON.
    Column("files", Text, nullable=False),
    # canary, full, rolled_back or superseded.
    Column("state", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    # Ids of the clients that get it first, as JSON.
    Column("canary", Text, nullable=False),
    # The share of errors above which it is rolled back.
    Column("max_errors", Double, nullable=False),
    # Seconds that each of them must report it as good for.
    Column("soak", Double, nullable=False),
    Column("created", Double, nullable=False),
    # When it got its state.
    Column("changed", Double, nullable=False),
)
# One canary and one full version to a run, whatever a bug in the server may try.
for _state in ("canary", "full"):
    Index(
        f"release_{_state}",
        releases.c.run_id,
        unique=True,
        sqlite_where=releases.c.state == _state,
        postgresql_where=releases.c.state == _state,
    )

# What each client was offered of a version, and what it has said of it.
installations = Table(
    "installations",
    metadata,
    Column("version", Integer, ForeignKey("releases.version"), primary_key=True, autoincrement=False),
    Column("client_id", String(32), ForeignKey("clients.client_id"), primary_key=True),
    Column("format", Text, primary_key=True),
    # Whether it is the one that the client runs, as far as it has said.
    Column("running", Boolean, nullable=False),
    Column("offered", Double, nullable=False),
    Column("ok", BigInteger, nullable=False),
    Column("errors", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    # Of the reports without an interruption by an error: when the first came; NULL: the last was none such.
    Column("good_since", Double),
    # When the last report came; NULL: none has.
    Column("reported", Double),
)

pins = Table(
    "pins",
    metadata,
    Column("client_id", String(32), ForeignKey("clients.client_id"), primary_key=True),
    Column("version", Integer, ForeignKey("releases.version"), nullable=False),
)

# Names of all blobs that were put, from before that until after they are deleted. No other is ever deleted.
blobs = Table("blobs", metadata, Column("name", LargeBinary, primary_key=True))

# Which server leads; at most one row.
leadership = Table(
    "leadership",
    metadata,
    Column("seat", Integer, primary_key=True, autoincrement=False),
    # What tells the servers apart.
    Column("holder", Text, nullable=False),
    # Grows whenever somebody begins to lead.
    Column("epoch", BigInteger, nullable=False),
    # By the database's clock.
    Column("expires", Double, nullable=False),
    CheckConstraint("seat = 0", name="one_leader"),
)

# About the database itself: its id, which its blobs bear too, and where they are.
facts = Table(
    "facts",
    metadata,
    Column("name", String(32), primary_key=True),
    Column("value", Text, nullable=False),
)


class DatabaseError(ValueError):
    """A database that cannot be used."""


def sqlite_url(path: Path) -> str:
    return URL.create("sqlite", database=str(path)).render_as_string(hide_password=False)


def open_database(url: str) -> Engine:
    """Connect, and bring the tables to this version."""
    return _opened(url, migrate)


def join_database(url: str) -> Engine:
    """Connect to a database whose tables are at this version; StoreFailed where they are not."""
    return _opened(url, _require_current)


def _opened(url: str, prepare: Callable[[Engine], None]) -> Engine:
    engine = make_engine(url)
    try:
        prepare(engine)
    except DBAPIError as error:
        engine.dispose()
        place = engine.url.render_as_string(hide_password=True)
        if isinstance(error, OperationalError):
            raise StoreFailed(f"the database {place} cannot be reached: {one_line(error)}") from error
        raise DatabaseError(f"{place} cannot be used as the database: {one_line(error)}") from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def one_line(error: Exception) -> str:
    """What the driver said, without the statement."""
    said = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    return " ".join(str(said).split()) or type(said).__name__


def migrate(engine: Engine) -> None:
    """Run the migrations that are missing; Alembic is loaded only if there are any, for a quick restart."""
    with engine.connect() as connection:
        current = revision_of(connection)
    if current == SCHEMA_REVISION:
        return
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", "fedmpq.server:migrations")
    with writing(engine) as connection:
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise DatabaseError(
                f"the database is at revision {current}, which this version does not know ({error}); "
                "install the version that made it, or a newer one"
            ) from None


def _require_current(engine: Engine) -> None:
    with engine.connect() as connection:
        current = revision_of(connection)
    if current != SCHEMA_REVISION:
        raise StoreFailed(
            f"the database is at revision {current}, this version is at {SCHEMA_REVISION}; start a leader of "
            "this version, which brings the tables to it"
        )


def writing(engine: Engine) -> Any:
    """A transaction that may write: `with writing(engine) as connection`."""
    return engine.execution_options(fedmpq_write=True).begin()


def revision_of(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return revision


def make_engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise DatabaseError(
            f"{url!r} is no database URL; write postgresql://USER@HOST/NAME or sqlite:///PATH"
        ) from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    try:
        if parsed.get_backend_name() == "sqlite":
            return _sqlite_engine(parsed)
        if "connect_timeout" not in parsed.query:
            parsed = parsed.update_query_dict({"connect_timeout": str(CONNECT_SECONDS)})
        return create_engine(parsed, pool_pre_ping=True)
    except NoSuchModuleError:
        raise DatabaseError(
            f"no driver for {parsed.drivername!r}; use a SQLite file or a postgresql:// URL"
        ) from None


def _sqlite_engine(url: URL) -> Engine:
    engine = create_engine(url, connect_args={"timeout": BUSY_SECONDS})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        # Transactions begin below, and not where the driver thinks one is needed.
        connection.isolation_level = None
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A transaction that reads first and writes later could not be repeated; it takes the lock at once.
        writes = connection.get_execution_options().get("fedmpq_write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
