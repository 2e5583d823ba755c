"""Asynchronous merges: which version of the model a place was sent, and where that is kept."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("seats", sa.Column("version", sa.Integer(), nullable=True))
    op.add_column("seats", sa.Column("sent_model", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    raise NotImplementedError("there is no way back; bring back the backup")
