"""Tables of what front-ends and the leader tell one another, in the same database as everything else.

None of it is a fact of a run: all rows could be lost, and boards would say once more what they have said.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
)

from fedmpq.server.database import metadata

front_ends = Table(
    "front_ends",
    metadata,
    # New with every start of the process.
    Column("front_id", String(32), primary_key=True),
    # Where it listens, for the operator's eyes.
    Column("address", Text, nullable=False),
    # By the database's clock; who does not renew it is gone, and so are its boards.
    Column("expires", Double, nullable=False),
    # Grows with every change of the boards at it, in the order in which changes are committed.
    Column("version", BigInteger, nullable=False),
)

# At which front-end a board has its newest stream.
presence = Table(
    "presence",
    metadata,
    Column("client_id", String(32), ForeignKey("clients.client_id"), primary_key=True),
    Column("front_id", String(32), nullable=False),
    # The front-end's version with which this row came.
    Column("version", BigInteger, nullable=False),
    # Whether the stream is open.
    Column("here", Boolean, nullable=False),
    # What the board has said of itself on this stream, as JSON.
    Column("said", Text, nullable=False),
)
Index("presence_at", presence.c.front_id, presence.c.version)

# What a board said to another front-end than the one that has its stream, which takes it from here.
forwarded = Table(
    "forwarded",
    metadata,
    Column("sequence", Integer, primary_key=True),
    Column("client_id", String(32), ForeignKey("clients.client_id"), nullable=False),
    # The run it is ready for; NULL: it cannot take part.
    Column("ready_for", Text),
    # Why it cannot.
    Column("declined", Text, nullable=False),
)

# Pieces of uploads that broke off, each a blob: whoever is called next goes on after the last of them.
upload_parts = Table(
    "upload_parts",
    metadata,
    Column("client_id", String(32), ForeignKey("clients.client_id"), primary_key=True),
    # Hash of the whole upload.
    Column("payload", LargeBinary, primary_key=True),
    # Where in the upload the piece begins, and how long it is.
    Column("start", BigInteger, primary_key=True, autoincrement=False),
    Column("size", BigInteger, nullable=False),
    # Hash of the piece.
    Column("blob", LargeBinary, nullable=False),
)
