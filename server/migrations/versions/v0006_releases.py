"""Models are rolled out in versions: which there are, who was offered them, and what boards say of them."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    _create_releases()
    op.create_table(
        "installations",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("running", sa.Boolean(), nullable=False),
        sa.Column("offered", sa.Double(), nullable=False),
        sa.Column("ok", sa.BigInteger(), nullable=False),
        sa.Column("errors", sa.BigInteger(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("good_since", sa.Double(), nullable=True),
        sa.Column("reported", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["version"], ["releases.version"]),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"]),
        sa.PrimaryKeyConstraint("version", "client_id", "format"),
    )
    op.create_table(
        "pins",
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["client_id"], ["clients.client_id"]),
        sa.ForeignKeyConstraint(["version"], ["releases.version"]),
        sa.PrimaryKeyConstraint("client_id"),
    )


def _create_releases() -> None:
    op.create_table(
        "releases",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("files", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("canary", sa.Text(), nullable=False),
        sa.Column("max_errors", sa.Double(), nullable=False),
        sa.Column("soak", sa.Double(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("changed", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
        sa.PrimaryKeyConstraint("version"),
    )
    for state in ("canary", "full"):
        chosen = sa.text(f"state = '{state}'")
        op.create_index(
            f"release_{state}",
            "releases",
            ["run_id"],
            unique=True,
            sqlite_where=chosen,
            postgresql_where=chosen,
        )


def downgrade() -> None:
    raise NotImplementedError("there is no way back; bring back the backup")
