"""What the federation's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import postgres
from tests.databases import postgres_server

__all__ = ["database", "postgres_server"]


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """None for the SQLite file in the state folder, or the URL of an empty PostgreSQL database."""
    if request.param == "sqlite":
        yield None
        return
    server: postgres.Server = request.getfixturevalue("postgres_server")
    with server.database() as url:
        yield url
