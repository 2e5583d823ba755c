"""The database knows its blobs by name and place, answers that were thrown out, and merges that failed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "facts",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "blobs",
        sa.Column("name", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "thrown_out",
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("client", sa.Integer(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("receipt_id", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("struck", sa.Boolean(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id", "client"], ["members.run_id", "members.client"]),
        sa.PrimaryKeyConstraint("sequence"),
    )
    op.add_column("rounds", sa.Column("failures", sa.Integer(), nullable=False, server_default="0"))
    _record_blobs()


def _record_blobs() -> None:
    """Every blob that a stored fact refers to was put by this database."""
    op.execute(
        "INSERT INTO blobs (name) "
        "SELECT graph FROM runs UNION SELECT model FROM runs "
        "UNION SELECT model FROM rounds WHERE model IS NOT NULL "
        'UNION SELECT seats."update" FROM seats JOIN rounds ON rounds.run_id = seats.run_id '
        "AND rounds.round = seats.round AND rounds.phase = seats.phase "
        "WHERE rounds.state = 'open' AND seats.\"update\" IS NOT NULL"
    )


def downgrade() -> None:
    raise NotImplementedError("there is no way back; bring back the backup")
