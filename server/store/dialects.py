"""What SQLite and PostgreSQL say alike and SQLAlchemy says for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Table
from sqlalchemy.dialects import postgresql, sqlite


def dialect_insert(connection: Connection) -> Callable[[Table], Any]:
    """An INSERT that can be told what to do where the row is there already."""
    return postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
