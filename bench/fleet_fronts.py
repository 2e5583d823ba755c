"""The same fleet with front-ends beside a leader, on PostgreSQL: what an update costs each process.

Boards are shared out among the front-ends by process. A round with one front-end takes as long as that needs
for all updates, and the leader for the merge; several front-ends work at the same time. On a machine with
fewer cores than processes that shows in seconds only if each process has a share of a core of its own:
`--cores`.
"""

from __future__ import annotations

import shutil
import statistics
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from sqlalchemy.engine import make_url

from bench.confined import confined
from bench.fleet import (
    SECONDS_PER_BOARD,
    START_SECONDS,
    Case,
    boards_of,
    identities_of,
    moments_of,
    notes_of,
)
from bench.process_facts import parent_of
from bench.timing import load_average
from fedmpq.server.state_folder import StateFolder
from tools.programs import FEDMPQ, Program, free_ports, wait_for_port, wait_until


@dataclass(frozen=True)
class FrontsCase:
    fleet: Case
    fronts: int
    database: str
    """URL of an empty PostgreSQL database on this machine."""
    cores: float | None
    """That each server process, and the database, may use; None: as much as there is."""


@dataclass(frozen=True)
class FrontsResult:
    case: FrontsCase
    seconds: list[float]
    """Of each round."""
    cpu_seconds: dict[str, list[float]]
    """Of each process in each round; the database with all its processes."""
    not_ok: dict[str, int]
    load_before: list[float]
    load_after: list[float]

    def as_dict(self) -> dict[str, Any]:
        selected, seconds = self.case.fleet.selected, statistics.median(self.seconds)
        cpu = {name: 1000 * statistics.median(each) / selected for name, each in self.cpu_seconds.items()}
        return {
            "model": self.case.fleet.model,
            "boards": self.case.fleet.boards,
            "selected": selected,
            "fronts": self.case.fronts,
            "cores_each": self.case.cores,
            "seconds_per_round": round(seconds, 3),
            "seconds": [round(one, 3) for one in self.seconds],
            "boards_per_second": round(selected / seconds, 1),
            "cpu_ms_per_update": {name: round(one, 3) for name, one in cpu.items()},
            "calls_not_ok": self.not_ok,
            "load_average_before": self.load_before,
            "load_average_after": self.load_after,
        }


def measure_fronts(case: FrontsCase) -> FrontsResult:
    before = load_average()
    with TemporaryDirectory(prefix="fedmpq-fleet-") as scratch, ExitStack() as stack:
        return _measured(case, Path(scratch), stack, before)


def _measured(case: FrontsCase, folder: Path, stack: ExitStack, before: list[float]) -> FrontsResult:
    fleet, leader_state = case.fleet, StateFolder(folder / "leader")
    files = identities_of(fleet, leader_state, folder, "--database", case.database)
    (folder / "fleet.toml").write_text(fleet.settings(), encoding="utf-8")
    leader = stack.enter_context(_server(folder, "leader", [str(folder / "fleet.toml")], fleet))
    leader.wait_for("leading front-ends")
    ports = free_ports(case.fronts)
    fronts = [stack.enter_context(_front(folder, number, port, fleet)) for number, port in enumerate(ports)]
    for port, front in zip(ports, fronts, strict=True):
        wait_for_port(port, front)
    pids = {"leader": leader.process.pid}
    pids |= {f"front {number}": front.process.pid for number, front in enumerate(fronts)}
    pids["database"] = _database_pid(case.database)
    if case.cores is not None:
        for name, pid in pids.items():
            if name != "database":
                stack.enter_context(confined(name.replace(" ", "-"), pid, case.cores))
    boards = [
        stack.enter_context(boards_of(file, list(pids.values()), ports[number % len(ports)], fleet))
        for number, file in enumerate(files)
    ]
    patience = START_SECONDS + SECONDS_PER_BOARD * fleet.boards * (fleet.rounds + 1) / (case.cores or 1)
    wait_until(lambda: not any(one.running for one in boards), "the boards", [leader, *fronts], patience)
    notes = [notes_of(one) for one in boards]
    moments = moments_of(notes, fleet)
    cpu = {
        name: [after["cpu_seconds"][at] - then["cpu_seconds"][at] for then, after in pairwise(moments)]
        for at, name in enumerate(pids)
    }
    return FrontsResult(
        case,
        [after["seconds"] - then["seconds"] for then, after in pairwise(moments)],
        cpu,
        dict(sum((Counter(one["not_ok"]) for one in notes), Counter[str]())),
        before,
        load_average(),
    )


def _server(folder: Path, name: str, words: list[str], fleet: Case) -> Program:
    role = "leader" if name == "leader" else "front"
    command = [*FEDMPQ, "server", *words, "--role", role, "--state", str(folder / name), "--insecure"]
    command += ["--blobs", str(folder / "blobs"), "--max-clients", str(fleet.boards + 1)]
    return Program(command, folder / f"{name}.log")


def _front(folder: Path, number: int, port: int, fleet: Case) -> Program:
    state = folder / f"front-{number}"
    state.mkdir(mode=0o700)
    shutil.copy(folder / "leader" / "database", state / "database")
    return _server(folder, state.name, ["--listen", f"127.0.0.1:{port}"], fleet)


def _database_pid(url: str) -> int:
    """Of the process whose children serve connections."""
    plain = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        return parent_of(int(row[0]))


def table_of_fronts(facts: dict[str, Any]) -> str:
    """What `as_dict` says, for a terminal."""
    failed = ", ".join(f"{count} {call}" for call, count in facts["calls_not_ok"].items()) or "none"
    cores = "all there are" if facts["cores_each"] is None else f"{facts['cores_each']:g} each"
    rows = [
        ("boards, selected a round", f"{facts['boards']:,}, {facts['selected']:,}"),
        ("front-ends, cores", f"{facts['fronts']}, {cores}"),
        ("seconds a round", f"{facts['seconds_per_round']:.3f}  (each: {facts['seconds']})"),
        ("boards a second", f"{facts['boards_per_second']}"),
    ]
    rows += [(f"CPU ms an update, {name}", f"{ms:.3f}") for name, ms in facts["cpu_ms_per_update"].items()]
    rows.append(("calls that ended not OK", failed))
    return "\n".join(
        [
            f"{facts['model']} on {facts['cpu_model']}, {facts['cores']} cores",
            *(f"{title:<34}{value}" for title, value in rows),
            f"load average before {facts['load_average_before']}, after {facts['load_average_after']}",
        ]
    )
