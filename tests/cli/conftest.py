"""What the tests of the commands share."""

from tests.databases import database_url, postgres_server

__all__ = ["database_url", "postgres_server"]
