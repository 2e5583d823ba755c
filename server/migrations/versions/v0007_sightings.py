"""When each board was last connected and what it said then is known after a restart too."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "sightings",
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("last_seen", sa.Double(), nullable=False),
        sa.Column("certificate_ends", sa.Double(), nullable=True),
        sa.Column("free_bytes", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"]),
        sa.PrimaryKeyConstraint("client_id"),
    )


def downgrade() -> None:
    raise NotImplementedError("there is no way back; bring back the backup")
