"""The two sides of a history: what clients were told and sent, and what the store ended with."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fedmpq.exchange.messages import Phase
from fedmpq.exchange.wire import digest
from fedmpq.server.blobs import open_blobs
from fedmpq.server.own_blobs import place_of_blobs
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.store.errors import UnknownRound
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Member, Round, RoundAddress, Run
from fedmpq.server.store.sql import open_store

Line = dict[str, Any]


class Place(NamedTuple):
    """One client's part in one round's training or calibration."""

    client_id: str
    run_id: str
    round: int
    phase: Phase

    def __str__(self) -> str:
        return f"client {self.client_id[:8]}, {self.phase} of round {self.round}"


@dataclass
class Told:
    """What all clients were told, in the order in which each of them was, and every payload they sent."""

    lines: dict[str, list[Line]] = field(default_factory=dict)
    """By client id; without the pieces of uploads."""
    payloads: dict[bytes, bytes] = field(default_factory=dict)
    """Whole uploads by their hash."""
    senders: dict[bytes, set[str]] = field(default_factory=dict)
    """Who has sent anything under a hash."""

    def of(self, kind: str) -> Iterator[Line]:
        for lines in self.lines.values():
            yield from (line for line in lines if line["kind"] == kind)

    def at(self, place: Place) -> list[Line]:
        """What the client was told of the place, in order."""
        return [line for line in self.lines.get(place.client_id, ()) if place_of(line) == place]


def place_of(line: Line) -> Place | None:
    """None for what concerns a whole run."""
    if "round" not in line:
        return None
    return Place(line["client_id"], line["run_id"], line["round"], line["phase"])


def read_told(folder: Path) -> Told:
    """The histories `*.jsonl` of a folder. The last line of a client that was killed may be cut short."""
    told = Told()
    for path in sorted(folder.glob("*.jsonl")):
        sent: dict[str, list[Line]] = defaultdict(list)
        for line in _lines(path):
            if line["kind"] == "sent":
                sent[line["payload"]].append(line)
            else:
                told.lines.setdefault(line["client_id"], []).append(line)
        for name, pieces in sent.items():
            payload = bytes.fromhex(name)
            told.senders.setdefault(payload, set()).update(piece["client_id"] for piece in pieces)
            if (whole := _assembled(payload, pieces)) is not None:
                told.payloads[payload] = whole
    return told


def _lines(path: Path) -> Iterator[Line]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def _assembled(payload: bytes, pieces: list[Line]) -> bytes | None:
    """The upload that has the hash, if the pieces of one call, or of all calls together, make it up."""
    calls: dict[str, list[Line]] = defaultdict(list)
    for piece in pieces:
        calls[piece["call"]].append(piece)
    for group in (*calls.values(), pieces):
        whole = bytearray()
        for piece in group:
            data, offset = base64.b64decode(piece["data"]), piece["offset"]
            whole[offset : offset + len(data)] = data
        if digest(bytes(whole)) == payload:
            return bytes(whole)
    return None


@dataclass(frozen=True)
class First:
    """What a run began with: the bytes of its graph and of its first model, which the store soon forgets."""

    graph: bytes
    model: bytes


@dataclass(frozen=True)
class Stored:
    """What the store holds of a run."""

    run: Run
    members: tuple[Member, ...]
    rounds: tuple[Round, ...]
    """Trainings and calibrations in the order in which they were opened."""
    blobs: Mapping[bytes, bytes]
    """What the blob store held at the end, by its name; bytes that do not fit their name are here too."""

    @property
    def client_ids(self) -> dict[int, str]:
        return {member.client: member.client_id for member in self.members}


def read_stored(store: Store, blobs: Path | str, name: str | None = None) -> Stored:
    """The run of that name, or the only one."""
    run = _run(store, name)
    rounds: list[Round] = []
    for number in range(1, run.round + 2):
        try:
            rounds.append(store.round(run.run_id, number))
        except UnknownRound:
            break
        if (calibration := store.calibration(run.run_id, number)) is not None:
            rounds.append(calibration)
    return Stored(run, tuple(store.members(run.run_id)), tuple(rounds), read_blobs(blobs))


def read_first(store: Store, blobs: Path | str, name: str | None = None) -> First:
    """Before the first round has been merged."""
    run = _run(store, name)
    assert run.round == 0, f"run {run.name!r} has merged {run.round} rounds: its first model is gone"
    found = read_blobs(blobs)
    return First(found[run.graph], found[run.model])


def stored_in(state: StateFolder, name: str | None = None) -> Stored:
    store = open_store(state.database_url())
    try:
        return read_stored(store, place_of_blobs(store, None, state.blobs), name)
    finally:
        store.close()


def first_in(state: StateFolder, name: str | None = None) -> First:
    store = open_store(state.database_url())
    try:
        return read_first(store, place_of_blobs(store, None, state.blobs), name)
    finally:
        store.close()


def read_blobs(place: Path | str) -> dict[bytes, bytes]:
    """The files themselves: opening them as the server does would remove what it is just writing."""
    if isinstance(place, str) and "://" in place:
        remote = open_blobs(place, make=False)
        return {name: remote.read(name) for name in remote.names()}
    found = {}
    for path in Path(place).iterdir():
        if len(path.name) == 64 and not path.name.startswith("."):
            # The server deletes what it needs no more beside its work; what it does need, the checks miss.
            with suppress(FileNotFoundError):
                found[bytes.fromhex(path.name)] = path.read_bytes()
    return found


def _run(store: Store, name: str | None) -> Run:
    runs = [run for run in store.list_runs() if name in (None, run.name)]
    assert len(runs) == 1, f"{len(runs)} runs are called {name!r}"
    return runs[0]


def address_of(place: Place) -> RoundAddress:
    return RoundAddress(place.run_id, place.round, place.phase)
