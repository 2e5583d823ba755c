"""An operator limits what clients may claim of themselves."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    for table in ("tokens", "clients"):
        op.add_column(table, sa.Column("max_samples", sa.BigInteger(), nullable=True))
        op.add_column(table, sa.Column("max_budget", sa.Double(), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("there is no way back; bring back the backup")
