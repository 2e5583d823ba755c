"""Front-ends beside the leader: who they are, which boards are at them, and pieces of uploads."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "front_ends",
        sa.Column("front_id", sa.String(32), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("front_id"),
    )
    op.create_table(
        "presence",
        sa.Column("client_id", sa.String(32), nullable=False),
        sa.Column("front_id", sa.String(32), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("here", sa.Boolean(), nullable=False),
        sa.Column("said", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"]),
        sa.PrimaryKeyConstraint("client_id"),
    )
    op.create_index("presence_at", "presence", ["front_id", "version"])
    op.create_table(
        "forwarded",
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("client_id", sa.String(32), nullable=False),
        sa.Column("ready_for", sa.Text(), nullable=True),
        sa.Column("declined", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"]),
        sa.PrimaryKeyConstraint("sequence"),
    )
    op.create_table(
        "upload_parts",
        sa.Column("client_id", sa.String(32), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("blob", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"]),
        sa.PrimaryKeyConstraint("client_id", "payload", "start"),
    )


def downgrade() -> None:
    raise NotImplementedError("there is no way back; bring back the backup")
