"""Fixtures for tests that need a store: a database of each kind it can use. A conftest imports them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import postgres


@contextmanager
def running_postgres() -> Iterator[postgres.Server]:
    """A server of one's own. Where there is none the test is skipped, unless the environment asks for it."""
    with ExitStack() as stack:
        try:
            server = stack.enter_context(postgres.running())
        except postgres.NoPostgres as reason:
            if os.environ.get(postgres.SETTING):
                raise
            pytest.skip(str(reason))
        yield server


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """One for each process of the test run, started by the first test that needs it."""
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database: the test runs once with SQLite and once with PostgreSQL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'fedmpq.db'}"
        return
    server: postgres.Server = request.getfixturevalue("postgres_server")
    with server.database() as url:
        yield url
