"""What the tests of the commands share."""

from tests.databases import database_url, postgres_server
from tests.small_network import make_data, make_model

__all__ = ["database_url", "make_data", "make_model", "postgres_server"]
