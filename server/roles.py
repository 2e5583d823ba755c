"""Which servers work together on one database: one that is alone, or a leader with front-ends beside it."""

from __future__ import annotations

from sqlalchemy.engine import make_url

from fedmpq.server.run_config import ConfigError, RunConfig
from fedmpq.server.server_settings import Role, ServeError, ServerSettings
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.protocol import Store

FACT = "role"
"""Under this name the store has the role of the server that leads."""


def check_role(settings: ServerSettings) -> None:
    """Front-ends and their leader meet in a database that several machines reach."""
    if settings.role == "all" or make_url(settings.state.database_url()).get_backend_name() == "postgresql":
        return
    raise ServeError(
        f"--role {settings.role} needs PostgreSQL, where front-ends and leader meet; this server's store is "
        "a SQLite file: name the database with --database postgresql://USER@HOST/NAME, or leave out --role"
    )


def settle_role(store: Store, role: Role) -> None:
    """A server that has just begun to lead says how. One that is alone does not learn of answers that
    front-ends take, so it refuses to lead where there are some."""
    if role == "all":
        there = [front.address for front in store.front_ends() if front.left > 0]
        if there:
            raise ServeError(
                f"front-ends are at work on this database ({', '.join(there)}), and a server that is alone "
                "does not lead them; start it with --role leader, or stop them"
            )
    if (store.fact(FACT) or "all") != role:
        store.remember(**{FACT: role})


def require_rounds(config: RunConfig) -> None:
    """Front-ends take answers of one open round; an asynchronous merge goes over into the next while boards
    bring theirs, which only the process that merges can follow."""
    if config.asynchronous is not None:
        raise ConfigError(
            f"asynchronous = {config.asynchronous} does not go with front-ends: serve run {config.name!r} by "
            "one server, without --role, or leave asynchronous out and train it in rounds"
        )


def require_leader(store: Store) -> None:
    """Raises StoreFailed while no leader of front-ends is the one that leads, or has led last."""
    if store.fact(FACT) != "leader":
        known = store.leader()
        alone = "" if known is None else f"; the server that leads, {known.holder}, serves boards itself"
        raise StoreFailed(
            f"no leader of front-ends has begun on this database{alone}: start it with --role leader"
        )
