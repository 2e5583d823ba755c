"""The power goes at hundreds of moments of a run: nothing acknowledged is lost, and the run goes on.

A real server runs several rounds with calibrations while a journal is kept of its files and of what it sends
(`journal.py`). At each of the chosen moments a folder is made of what a disk may hold after the power went,
and a server is started in it. Whatever the first server had sent by then is checked against what the second
one finds, by the checker of histories; a part of the runs is brought to its end.

FEDMPQ_POWER_CUTS says at how many moments, 210 if it is not set.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.state_folder import StateFolder
from tests.fast_server import FastServer
from tests.history.checker import violations
from tests.history.facts import First, Line, Stored, Told, read_told, stored_in
from tests.power_loss.journal import CUTS, Disk, Kind, Record, build, environment, read_journal
from tests.server.loopback import Federation, run_all
from tests.server.stand_in import StandIn

MOMENTS = int(os.environ.get("FEDMPQ_POWER_CUTS", "210"))
FINISHED_EVERY = 30
"""Of so many moments one is followed by the rest of the run."""
ROUNDS = 5
CLIENTS = 3
PATIENCE = 120.0


@dataclass(frozen=True)
class Recording:
    """A whole run: what happened on the disk, and what was said."""

    folder: Path
    """Where its files were."""
    records: list[Record]
    clients: list[StandIn]
    told: Told
    stored: Stored
    first: First


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder = tmp_path_factory.mktemp("recorded")
    journal = folder / "journal"
    settings = {"rounds": ROUNDS, "clients_per_round": CLIENTS}
    with FastServer(folder, settings) as server:
        server.environment = environment(build(folder), server.state.path, journal)
        first, token = server.start(), server.token()
        clients = [server.stand_in(f"client-{n}", budget=2.0 + 2 * n, samples=10 + n) for n in range(CLIENTS)]

        async def take_part() -> list[str]:
            for client in clients:
                await client.enrol(token)
            try:
                return await asyncio.wait_for(asyncio.gather(*(client.run() for client in clients)), PATIENCE)
            finally:
                for client in clients:
                    await client.close()

        assert asyncio.run(take_part()) == ["finished"] * CLIENTS
    told = read_told(server.histories)
    records = list(read_journal(journal))
    # Whoever opens the database changes its files.
    opened = shutil.copytree(server.state.path, folder / "opened", ignore=shutil.ignore_patterns("*.sock"))
    return Recording(server.state.path, records, clients, told, stored_in(StateFolder(Path(opened))), first)


def test_the_recorded_run_is_whole(recording: Recording) -> None:
    """Otherwise the other tests show nothing: all was recorded, and the folder follows from the journal."""
    assert violations(recording.told, recording.stored, recording.first) == []
    assert len(list(recording.told.of("receipt"))) >= 2 * ROUNDS * CLIENTS
    disk = Disk(recording.folder)
    for record in recording.records:
        disk.follow(record)
    disk.flush_all()
    copy = recording.folder.parent / "copy"
    copy.mkdir()
    disk.after_power_cut("dropped", copy, random.Random(0))
    for path in recording.folder.rglob("*"):
        # The kernel shares SQLite's index of its log by mapping it, and nothing of it needs to last.
        if path.is_file() and not path.name.endswith("-shm"):
            assert (copy / path.relative_to(recording.folder)).read_bytes() == path.read_bytes(), path


# What was said by when


@dataclass(frozen=True)
class Said:
    """A line of a history, and the record with which it left the server."""

    line: Line
    at: int


def said_when(recording: Recording) -> list[Said]:
    """Every receipt, assignment and identity, with its place in the journal."""
    wanted: dict[bytes, list[Line]] = {}
    for kind, key in (("receipt", _receipt_mark), ("assignment", _assignment_mark)):
        for line in recording.told.of(kind):
            wanted.setdefault(key(line), []).append(line)
    found: dict[bytes, int] = {}
    for at, record in enumerate(recording.records):
        if record.kind is Kind.SEND:
            for mark in wanted.keys() - found.keys():
                if mark in record.data:
                    found[mark] = at
    assert found.keys() == wanted.keys(), "something was told that was never seen to leave"
    return [Said(line, found[mark]) for mark, lines in wanted.items() for line in lines]


def _receipt_mark(line: Line) -> bytes:
    return str(line["receipt_id"]).encode()


def _assignment_mark(line: Line) -> bytes:
    """How the message begins: two rounds may send the same payload."""
    said = {name: line[name] for name in ("run_id", "round", "client", "seed")}
    return pb.Assignment(**said, payload=bytes.fromhex(line["payload"])).SerializeToString()


def enrolled_when(recording: Recording) -> dict[str, int]:
    ids = {client.identity.partition(".")[0] for client in recording.clients}
    return {
        client_id: next(
            at
            for at, record in enumerate(recording.records)
            if record.kind is Kind.SEND and client_id.encode() in record.data
        )
        for client_id in ids
    }


def told_by(said: Iterable[Said], at: int, everything: Told) -> Told:
    """What clients can have heard before that record."""
    lines: dict[str, list[Line]] = {}
    for one in said:
        if one.at < at:
            lines.setdefault(one.line["client_id"], []).append(one.line)
    return Told(lines, everything.payloads, everything.senders)


# The moments


def moments_of(records: Sequence[Record], count: int) -> list[int]:
    """Just before and after flushes, changes of names and messages as often as in the middle of writes."""
    sharp = (Kind.FLUSH, Kind.FLUSH_FOLDER, Kind.RENAME, Kind.SEND)
    near = [at + after for at, one in enumerate(records) if one.kind in sharp for after in (0, 1)]
    others = [at for at, one in enumerate(records) if one.kind not in sharp]
    chosen = random.Random(11)
    return sorted([*chosen.choices(near, k=count // 2), *chosen.choices(others, k=count - count // 2)])


def test_nothing_acknowledged_is_lost_when_the_power_goes(recording: Recording, tmp_path: Path) -> None:
    said, enrolled = said_when(recording), enrolled_when(recording)
    disk, at, lost = Disk(recording.folder), 0, list[str]()
    moments = moments_of(recording.records, MOMENTS)
    for number, moment in enumerate(moments):
        while at < moment:
            disk.follow(recording.records[at])
            at += 1
        cut = CUTS[number % len(CUTS)]
        image = tmp_path / "image"
        image.mkdir(mode=0o700)
        disk.after_power_cut(cut, image, random.Random(number))
        told = told_by(said, moment, recording.told)
        clients = [one for one, when in enrolled.items() if when < moment]
        found = asyncio.run(back(image, told, clients, recording, finish=number % FINISHED_EVERY == 0))
        lost += [f"record {moment}, {cut}: {one}" for one in found]
        shutil.rmtree(image)
    assert not lost, f"{len(lost)} faults after {len(moments)} power cuts:\n" + "\n".join(lost[:20])


async def back(
    image: Path, told: Told, clients: Sequence[str], recording: Recording, *, finish: bool
) -> list[str]:
    """What is wrong when the power is back and a server goes on with the folder."""
    server = Federation(image)
    await server.start()
    try:
        known = {one.client_id for one in server.store.list_clients()}
        found = [f"the identity of client {one} is lost" for one in clients if one not in known]
        if not server.store.list_runs():
            return [*found, "a run is lost that clients were told of"] if told.lines else found
        while server.coordinator.loading:
            await asyncio.sleep(0.002)
        if finish := finish and len(clients) == CLIENTS:
            told = joined(told, await to_the_end(server, recording))
    finally:
        await server.stop()
    stored = stored_in(StateFolder(image))
    if finish and stored.run.model != recording.stored.run.model:
        found.append("the run ended with another model than the one that was not disturbed")
    return [*found, *violations(told, stored, recording.first), *unsound(image)]


def unsound(image: Path) -> list[str]:
    with closing(sqlite3.connect(image / "fedmpq.db")) as database:
        (said,) = database.execute("PRAGMA integrity_check").fetchone()
    return [] if said == "ok" else [f"the database is damaged: {said}"]


async def to_the_end(server: Federation, recording: Recording) -> Told:
    """The same clients take the run to its end; what they are told."""
    clients = [
        StandIn(server.address, one.name, one.budget, one.samples, one.identity) for one in recording.clients
    ]
    for client in clients:
        client.recorder = server.recorder(client.name)
    assert await run_all(clients) == ["finished"] * CLIENTS
    return read_told(server.histories)


def joined(one: Told, later: Told) -> Told:
    lines = {who: [*one.lines.get(who, ()), *later.lines.get(who, ())] for who in one.lines | later.lines}
    names = one.senders | later.senders
    senders = {name: one.senders.get(name, set()) | later.senders.get(name, set()) for name in names}
    return Told(lines, one.payloads | later.payloads, senders)
