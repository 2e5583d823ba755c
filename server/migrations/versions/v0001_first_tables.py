"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "runs",
        sa.Column("sequence", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("class_names", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("graph", sa.LargeBinary(), nullable=False),
        sa.Column("model", sa.LargeBinary(), nullable=False),
        sa.Column("bit_widths", sa.LargeBinary(), nullable=True),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("bytes_up", sa.BigInteger(), nullable=False),
        sa.Column("bytes_down", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("sequence"),
        sa.UniqueConstraint("name"),
        sa.UniqueConstraint("run_id"),
    )
    op.create_table(
        "tokens",
        sa.Column("token_id", sa.String(length=12), nullable=False),
        sa.Column("token_hash", sa.LargeBinary(), nullable=False),
        sa.Column("client_name", sa.String(length=64), nullable=True),
        sa.Column("uses_left", sa.Integer(), nullable=True),
        sa.Column("expires", sa.Double(), nullable=True),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.Column("created", sa.Double(), nullable=False),
        sa.CheckConstraint("uses_left >= 0", name="token_uses"),
        sa.PrimaryKeyConstraint("token_id"),
        sa.UniqueConstraint("token_hash"),
    )
    op.create_table(
        "clients",
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("token_id", sa.String(length=12), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("certificate_name", sa.Text(), nullable=True),
        sa.Column("budget", sa.Double(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("first_seen", sa.Double(), nullable=True),
        sa.Column("revoked", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["token_id"],
            ["tokens.token_id"],
        ),
        sa.PrimaryKeyConstraint("client_id"),
    )
    op.create_index(
        "client_name",
        "clients",
        ["name"],
        unique=True,
        sqlite_where=sa.text("revoked IS NULL"),
        postgresql_where=sa.text("revoked IS NULL"),
    )
    op.create_table(
        "rounds",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("opened", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=True),
        sa.Column("extended", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=True),
        sa.Column("model", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.run_id"],
        ),
        sa.PrimaryKeyConstraint("run_id", "round"),
    )
    op.create_index(
        "round_open",
        "rounds",
        ["run_id"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_table(
        "members",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("client", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("client_id", sa.String(length=32), nullable=False),
        sa.Column("budget", sa.Double(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("dealt", sa.LargeBinary(), nullable=True),
        sa.Column("returned", sa.LargeBinary(), nullable=True),
        sa.Column("strikes", sa.Integer(), nullable=False),
        sa.Column("accuracy", sa.Double(), nullable=True),
        sa.Column("bytes_up", sa.BigInteger(), nullable=False),
        sa.Column("bytes_down", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["client_id"],
            ["clients.client_id"],
        ),
        sa.ForeignKeyConstraint(
            ["run_id"],
            ["runs.run_id"],
        ),
        sa.PrimaryKeyConstraint("run_id", "client"),
        sa.UniqueConstraint("run_id", "client_id", name="member_once"),
    )
    op.create_table(
        "seats",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("client", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("bit_widths", sa.LargeBinary(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("update", sa.LargeBinary(), nullable=True),
        sa.Column("update_bytes", sa.BigInteger(), nullable=True),
        sa.Column("receipt_id", sa.String(length=32), nullable=True),
        sa.ForeignKeyConstraint(
            ["run_id", "client"],
            ["members.run_id", "members.client"],
        ),
        sa.ForeignKeyConstraint(
            ["run_id", "round"],
            ["rounds.run_id", "rounds.round"],
        ),
        sa.PrimaryKeyConstraint("run_id", "round", "client"),
    )


def downgrade() -> None:
    for table in ("seats", "members", "rounds", "clients", "tokens", "runs"):
        op.drop_table(table)
