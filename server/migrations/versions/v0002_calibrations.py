"""Rounds and seats have a phase, runs know what they hand out; settings bear the names of this version."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("runs", sa.Column("ready", sa.Integer(), nullable=False, server_default="0"))
    op.execute("UPDATE runs SET ready = round")
    _make_tables()
    shared = "state, target, opened, deadline, extended, metrics, model"
    op.execute(
        f"INSERT INTO new_rounds (run_id, round, phase, {shared}) "
        f"SELECT run_id, round, 'training', {shared} FROM rounds"
    )
    shared = 'client, state, reason, bit_widths, payload, payload_bytes, "update", update_bytes, receipt_id'
    op.execute(
        f"INSERT INTO new_seats (run_id, round, phase, {shared}) "
        f"SELECT run_id, round, 'training', {shared} FROM seats"
    )
    # A primary key cannot be widened in SQLite: the new tables take the places of the old.
    for name in ("seats", "rounds"):
        op.drop_table(name)
    for name in ("rounds", "seats"):
        op.rename_table(f"new_{name}", name)
    op.create_index(
        "round_open",
        "rounds",
        ["run_id"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    _rename_settings()


def _make_tables() -> None:
    op.create_table(
        "new_rounds",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("target", sa.Integer(), nullable=False),
        sa.Column("opened", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=True),
        sa.Column("extended", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=True),
        sa.Column("model", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"]),
        sa.PrimaryKeyConstraint("run_id", "round", "phase"),
    )
    op.create_table(
        "new_seats",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("round", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("client", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("bit_widths", sa.LargeBinary(), nullable=False),
        sa.Column("payload", sa.LargeBinary(), nullable=False),
        sa.Column("payload_bytes", sa.BigInteger(), nullable=False),
        sa.Column("update", sa.LargeBinary(), nullable=True),
        sa.Column("update_bytes", sa.BigInteger(), nullable=True),
        sa.Column("receipt_id", sa.String(length=32), nullable=True),
        sa.ForeignKeyConstraint(["run_id", "client"], ["members.run_id", "members.client"]),
        sa.ForeignKeyConstraint(
            ["run_id", "round", "phase"], ["new_rounds.run_id", "new_rounds.round", "new_rounds.phase"]
        ),
        sa.PrimaryKeyConstraint("run_id", "round", "phase", "client"),
    )


def _rename_settings() -> None:
    """`moved_statistics` is `statistics` now, and the best profile neither thins out planes nor prunes."""
    runs = sa.table("runs", sa.column("run_id"), sa.column("config"))
    connection = op.get_bind()
    for row in connection.execute(sa.select(runs)).all():
        config = json.loads(row.config)
        moved = config.pop("moved_statistics", None)
        if moved is not None:
            config["statistics"] = "calibrated" if moved else "averaged"
        if config.get("profile", "best") == "best":
            config |= {"lasso": None, "prune_density": None}
        changed = sa.update(runs).where(runs.c.run_id == row.run_id)
        connection.execute(changed.values(config=json.dumps(config)))


def downgrade() -> None:
    raise NotImplementedError("there is no way back from calibrations; bring back the backup")
