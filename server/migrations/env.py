"""Alembic's entry: runs the migrations on the connection it is handed."""

from alembic import context

from fedmpq.server.database import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
