"""Seats of rounds that are long merged are one value on their round's row."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column("rounds", sa.Column("folded_seats", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("there is no way back; bring back the backup")
