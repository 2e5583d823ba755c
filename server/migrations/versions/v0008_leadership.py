"""One server leads at a time; a row says which, until when, and how often that has changed."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_table(
        "leadership",
        sa.Column("seat", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("expires", sa.Double(), nullable=False),
        sa.CheckConstraint("seat = 0", name="one_leader"),
        sa.PrimaryKeyConstraint("seat"),
    )


def downgrade() -> None:
    raise NotImplementedError("there is no way back; bring back the backup")
