"""Rounds of one server with many boards that train nothing: seconds, CPU time, memory and calls that failed.

The server is `fedmpq server` with its default store, in a process of its own. The boards are stand-ins that
speak the real protocol over real gRPC, many to a process (`bench.fleet_boards`), so that the server's CPU
time is measured apart from theirs. A round counts from its first assignment to the next round's, the last one
to the end of the run. Identities are written to the server's database before it starts: of one address
it would take 250 enrolments at once and one a second after that.
"""

from __future__ import annotations

import argparse
import json
import math
import secrets
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.machine import Machine, warn_if_busy
from bench.memory import ROOT
from bench.process_facts import ProcessFacts
from bench.timing import load_average
from bench.workload import CLASSES, IMAGE, INPUT_SCALE, INPUT_ZERO_POINT, MODELS
from fedmpq.server.authentication import secret_hash
from fedmpq.server.boards_port import STREAMS_PER_CONNECTION
from fedmpq.server.serve import SPARE_FILES
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.store.sql import open_store
from fedmpq.server.tokens import make_token
from fedmpq.system.open_files import allow_open_files
from tools.programs import FEDMPQ, Program, ProgramError, free_port, wait_for_port, wait_until

FORMS = {**MODELS, "digits_cnn": (1, 8, 8)}
BUDGETS = (8.0, 6.0, 4.0, 2.0)
"""Bits per weight of the boards, in turn."""
BOARDS_PER_PROCESS = 2500
START_SECONDS = 120.0
SECONDS_PER_BOARD = 0.2
"""A fleet that takes longer than this for each board to connect, and in every round, has failed."""
STEADY_SECONDS = 1.0


@dataclass(frozen=True)
class Case:
    """What to measure."""

    boards: int
    selected: int
    rounds: int = 3
    model: str = "digits_cnn"
    per_connection: int = 1
    """Boards that share a connection."""
    least_processes: int = 2
    """Of boards: one would be as busy as the server."""

    @property
    def processes(self) -> int:
        return min(self.boards, max(self.least_processes, math.ceil(self.boards / BOARDS_PER_PROCESS)))

    @property
    def open_files(self) -> int:
        """That the server needs, and no process of boards exceeds."""
        return math.ceil(self.boards / self.per_connection) + SPARE_FILES

    def settings(self) -> str:
        channels, height, width = FORMS.get(self.model, IMAGE)
        settings = {
            "model": self.model,
            "rounds": self.rounds,
            "clients_per_round": self.selected,
            # Every board is there before the first round.
            "min_clients": self.boards,
            "image": [height, width, channels],
            "classes": CLASSES,
            "input_scale": INPUT_SCALE,
            "input_zero_point": INPUT_ZERO_POINT,
            "statistics": "averaged",
        }
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())


@dataclass(frozen=True)
class Result:
    case: Case
    seconds: list[float]
    """Of each round."""
    cpu_seconds: list[float]
    """Of the server, in each round."""
    connecting_seconds: float
    """From the boards' start to the first assignment."""
    connecting_cpu_seconds: float
    base_bytes: int
    """The server's resident memory before any board is there."""
    connected_bytes: int
    """The same when all boards are ready and the first round has been opened."""
    peak_bytes: int
    not_ok: dict[str, int]
    """Calls that did not end OK, by call and status."""
    database_bytes: int
    bytes_up: int
    bytes_down: int
    load_before: list[float]
    load_after: list[float]

    def as_dict(self) -> dict[str, Any]:
        case, cpu = self.case, statistics.median(self.cpu_seconds)
        return {
            "model": case.model,
            "boards": case.boards,
            "selected": case.selected,
            "rounds": case.rounds,
            "per_connection": case.per_connection,
            "seconds_per_round": round(statistics.median(self.seconds), 3),
            "seconds": [round(seconds, 3) for seconds in self.seconds],
            "cpu_seconds": [round(seconds, 2) for seconds in self.cpu_seconds],
            "cpu_ms_per_update": round(1000 * cpu / case.selected, 3),
            "cpu_ms_per_board": round(1000 * cpu / case.boards, 3),
            "connecting_seconds": round(self.connecting_seconds, 2),
            "connecting_cpu_ms_per_board": round(1000 * self.connecting_cpu_seconds / case.boards, 3),
            "base_mb": round(self.base_bytes / 1e6, 1),
            "connected_kb_per_board": round((self.connected_bytes - self.base_bytes) / 1000 / case.boards, 2),
            "peak_kb_per_board": round((self.peak_bytes - self.base_bytes) / 1000 / case.boards, 2),
            "calls_not_ok": self.not_ok,
            "database_bytes": self.database_bytes,
            "payload_bytes_up": self.bytes_up,
            "payload_bytes_down": self.bytes_down,
            "load_average_before": self.load_before,
            "load_average_after": self.load_after,
        }


class FleetError(RuntimeError):
    """A fleet that this machine does not let be as large, or whose rounds were not whole."""


def measure(case: Case) -> Result:
    if (allowed := allow_open_files(case.open_files)) < case.open_files:
        raise FleetError(
            f"{case.boards} boards need {case.open_files} open files, this process may have {allowed}; "
            f"raise the limit (ulimit -n {case.open_files}, as root), or let boards share a connection"
        )
    before = load_average()
    with TemporaryDirectory(prefix="fedmpq-fleet-") as scratch:
        return _measured(case, Path(scratch), before)


def _measured(case: Case, folder: Path, before: list[float]) -> Result:
    state, config, port = StateFolder(folder / "server"), folder / "fleet.toml", free_port()
    files = identities_of(case, state, folder)
    config.write_text(case.settings(), encoding="utf-8")
    patience = START_SECONDS + SECONDS_PER_BOARD * case.boards * (case.rounds + 1)
    with ExitStack() as stack:
        server = stack.enter_context(_server(state.path, config, port, case))
        wait_for_port(port, server)
        base, began = _steady(server), time.monotonic()
        pids = [server.process.pid]
        boards = [stack.enter_context(boards_of(file, pids, port, case)) for file in files]
        wait_until(lambda: not any(one.running for one in boards), "the boards", [server], patience)
        notes = [notes_of(one) for one in boards]
        peak = round(server.peak_mb() * 1e6)
        database = sum(file.stat().st_size for file in state.path.glob("fedmpq.db*"))
    moments = moments_of(notes, case)
    return Result(
        case,
        [after["seconds"] - then["seconds"] for then, after in pairwise(moments)],
        [after["cpu_seconds"][0] - then["cpu_seconds"][0] for then, after in pairwise(moments)],
        moments[0]["seconds"] - began,
        moments[0]["cpu_seconds"][0] - base.cpu_seconds,
        base.resident_bytes,
        moments[0]["resident_bytes"],
        peak,
        dict(sum((Counter(one["not_ok"]) for one in notes), Counter[str]())),
        database,
        sum(one["bytes_up"] for one in notes),
        sum(one["bytes_down"] for one in notes),
        before,
        load_average(),
    )


def identities_of(case: Case, state: StateFolder, folder: Path, *words: str) -> list[Path]:
    """Enrols the boards; one file for each process of them."""
    command = [*FEDMPQ, "server", "init", "--state", str(state.path), "--json", *words]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    token, known = make_token(datetime.now(timezone.utc), uses=None).record, []
    with closing(open_store(state.database_url())) as store:
        store.add_token(token)
        for number in range(case.boards):
            secret, budget = secrets.token_urlsafe(32), BUDGETS[number % len(BUDGETS)]
            facts = (f"board-{number:06d}", budget, "bench", secret_hash(secret), None, time.time())
            known.append((f"{store.enrol(token.digest, *facts)}.{secret}", budget))
    files = [folder / f"boards-{number}.json" for number in range(case.processes)]
    for number, file in enumerate(files):
        file.write_text(json.dumps(known[number :: case.processes]), encoding="ascii")
    return files


def _server(state: Path, config: Path, port: int, case: Case) -> Program:
    words = [str(config), "--state", str(state), "--listen", f"127.0.0.1:{port}", "--insecure"]
    words += ["--max-clients", str(case.boards + 1)]
    return Program([*FEDMPQ, "server", *words], state.with_suffix(".log"))


def boards_of(identities: Path, pids: Sequence[int], port: int, case: Case) -> Program:
    """A process of boards that notes the CPU time of those processes."""
    command = [sys.executable, "-m", "bench.fleet_boards", "--server", f"127.0.0.1:{port}"]
    command += ["--server-pids", *map(str, pids), "--identities", str(identities)]
    command += ["--per-connection", str(case.per_connection)]
    command += ["--notes", str(identities.with_suffix(".notes"))]
    return Program(command, identities.with_suffix(".log"), {"PYTHONPATH": str(ROOT)})


def _steady(server: Program) -> ProcessFacts:
    """The server once its memory has stayed the same for a while: it has read the run then."""
    last, since = ProcessFacts.of(server.process.pid), time.monotonic()
    while time.monotonic() - since < STEADY_SECONDS:
        time.sleep(STEADY_SECONDS / 10)
        server.require_running()
        if (now := ProcessFacts.of(server.process.pid)).resident_bytes != last.resident_bytes:
            last, since = now, time.monotonic()
    return last


def notes_of(boards: Program) -> dict[str, Any]:
    path = boards.log.with_suffix(".notes")
    if not path.exists():
        raise ProgramError(f"boards ended without their notes:\n{boards.last_words()}")
    notes: dict[str, Any] = json.loads(path.read_text(encoding="ascii"))
    return notes


def moments_of(notes: list[dict[str, Any]], case: Case) -> list[dict[str, Any]]:
    """The first of each round in any process, and the end; each round must have had all its updates."""
    for number in map(str, range(1, case.rounds + 1)):
        updates = sum(one["updates"].get(number, 0) for one in notes)
        if updates != case.selected:
            raise FleetError(f"round {number} had {updates} updates of {case.selected}")
    found = [
        [one["rounds"][number] for one in notes if number in one["rounds"]]
        for number in map(str, range(1, case.rounds + 1))
    ]
    found.append([one["ended"] for one in notes])
    return [min(moments, key=lambda moment: float(moment["seconds"])) for moments in found]


def table(facts: dict[str, Any]) -> str:
    """What `as_dict` says, for a terminal."""
    failed = ", ".join(f"{count} {call}" for call, count in facts["calls_not_ok"].items()) or "none"
    payload = (facts["payload_bytes_up"] + facts["payload_bytes_down"]) / facts["rounds"] / facts["selected"]
    rows = (
        ("boards, selected a round", f"{facts['boards']:,}, {facts['selected']:,}"),
        ("seconds a round", f"{facts['seconds_per_round']:.3f}  (each: {facts['seconds']})"),
        ("server CPU ms, an update", f"{facts['cpu_ms_per_update']:.3f}"),
        ("server CPU ms, a board", f"{facts['cpu_ms_per_board']:.3f}"),
        (
            "connecting: s, CPU ms a board",
            f"{facts['connecting_seconds']}, {facts['connecting_cpu_ms_per_board']}",
        ),
        ("server MB before boards", f"{facts['base_mb']}"),
        ("kB a board, connected / peak", f"{facts['connected_kb_per_board']} / {facts['peak_kb_per_board']}"),
        ("calls that ended not OK", failed),
        ("database MB", f"{facts['database_bytes'] / 1e6:.2f}"),
        ("payload kB, an update, both ways", f"{payload / 1000:.1f}"),
    )
    return "\n".join(
        [
            f"{facts['model']} on {facts['cpu_model']}, {facts['cores']} cores",
            *(f"{title:<34}{value}" for title, value in rows),
            f"load average before {facts['load_average_before']}, after {facts['load_average_after']}",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet", description=__doc__)
    parser.add_argument("--boards", type=int, default=200, help="connected (default %(default)s)")
    parser.add_argument("--selected", type=int, help="in every round (default: all boards)")
    parser.add_argument("--rounds", type=int, default=3, help="default %(default)s")
    parser.add_argument("--model", choices=sorted(FORMS), default="digits_cnn", help="default %(default)s")
    parser.add_argument(
        "--per-connection",
        type=int,
        default=1,
        metavar="N",
        help="boards that share one (default 1, as real)",
    )
    parser.add_argument("--fronts", type=int, metavar="N", help="so many front-ends beside a leader")
    parser.add_argument(
        "--database", metavar="URL", help="an empty PostgreSQL database on this machine, for --fronts"
    )
    parser.add_argument(
        "--cores", type=float, metavar="C", help="confine the leader and each front-end to so many (as root)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main() -> None:
    parser = _parser()
    arguments = parser.parse_args()
    selected = arguments.boards if arguments.selected is None else arguments.selected
    for name in ("boards", "rounds", "per_connection"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(arguments, name)} is too few; the least is 1")
    if arguments.per_connection > (most := STREAMS_PER_CONNECTION // 2):
        parser.error(
            f"--per-connection {arguments.per_connection}: a connection may have {2 * most} calls, "
            f"a board has two at a time, so {most} can share one"
        )
    if not 1 <= selected <= arguments.boards:
        parser.error(f"--selected {selected} is outside 1..{arguments.boards}, the boards")
    warn_if_busy()
    case = Case(arguments.boards, selected, arguments.rounds, arguments.model, arguments.per_connection)
    if arguments.fronts is not None:
        _with_fronts(parser, arguments, case)
        return
    try:
        facts = {"bench": "fleet", **Machine.here().as_dict(), **measure(case).as_dict()}
    except FleetError as error:
        sys.exit(f"bench.fleet: {error}")
    print(json.dumps(facts) if arguments.json else table(facts))


def _with_fronts(parser: argparse.ArgumentParser, arguments: argparse.Namespace, case: Case) -> None:
    from bench.confined import CannotConfine
    from bench.fleet_fronts import FrontsCase, measure_fronts, table_of_fronts

    if arguments.fronts < 1 or arguments.database is None:
        parser.error("--fronts N, 1 or more, goes with --database postgresql://USER@HOST/NAME")
    # Each front-end has a process of boards at least.
    case = replace(case, least_processes=max(2, 2 * arguments.fronts))
    try:
        result = measure_fronts(FrontsCase(case, arguments.fronts, arguments.database, arguments.cores))
    except (FleetError, CannotConfine) as error:
        sys.exit(f"bench.fleet: {error}")
    facts = {"bench": "fleet", **Machine.here().as_dict(), **result.as_dict()}
    print(json.dumps(facts) if arguments.json else table_of_fronts(facts))


if __name__ == "__main__":
    main()
