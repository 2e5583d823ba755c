"""Migrations of the server's tables, oldest first; `database.migrate` runs those that are missing."""
