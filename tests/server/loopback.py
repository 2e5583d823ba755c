"""A real server of the Federation service on loopback, inside the test's own event loop, on a small graph.

`Federation.crash` drops it without a word, as SIGKILL would, and `start` reads everything from the store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc.aio

from fedmpq.exchange.messages import Calibration, Update
from fedmpq.exchange.wire import (
    decode_calibration,
    decode_update,
    encode_calibration,
    encode_model,
    encode_update,
    plan_to_message,
)
from fedmpq.method.archive import Tensors, pack_model, unpack_model
from fedmpq.method.quantized_method import QuantizedMethod, select_clients
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from fedmpq.server.blobs import Outgoing, Uploads
from fedmpq.server.boards_port import OPTIONS
from fedmpq.server.connections import Connections
from fedmpq.server.coordinator import Coordinator
from fedmpq.server.database import sqlite_url
from fedmpq.server.exports import Exports
from fedmpq.server.federation_service import FederationService
from fedmpq.server.own_blobs import open_own_blobs
from fedmpq.server.run_config import RunConfig, make_config
from fedmpq.server.store.records import Run
from fedmpq.server.store.sql import open_store
from fedmpq.server.tokens import make_token
from tests.history.checker import violations
from tests.history.facts import First, Stored, read_stored, read_told
from tests.history.recording import Recorder
from tests.server.small_model import GRAPH, first_state
from tests.server.stand_in import StandIn, made_up, nudge

PATIENCE = 60.0
THREADS = 8


def small_config(**settings: Any) -> RunConfig:
    """Two clients and three rounds, unless told otherwise."""
    plain = {
        "name": "small",
        "rounds": 3,
        "clients_per_round": 2,
        "image": [8, 8, 1],
        "classes": 5,
        "input_scale": 0.015625,
        "input_zero_point": 128,
    }
    return make_config({**plain, **settings})


def expected_model(
    config: RunConfig, clients: Sequence[tuple[float, int]], measuring: Collection[int] | None = None
) -> GlobalModel:
    """What an undisturbed run of stand-ins with these (budget, samples) comes to, without any server.

    Of those whose turn it is, `measuring` measure statistics, or all.
    """
    method = QuantizedMethod(GRAPH, config.recipe(), config.seed)
    records = [ClientRecord(n, budget, samples) for n, (budget, samples) in enumerate(clients)]
    model = method.start(*first_state(), records)
    for number in range(1, config.rounds + 1):
        chosen = select_clients(model.clients, config.seed, number, config.target(len(clients)))
        model = method.merge(model, [update_of(method, model, record) for record in chosen])
        if config.calibrates_after(number):
            asked = chosen if number < config.rounds else model.clients
            able = [record for record in asked if measuring is None or record.client in measuring]
            model = method.calibrated(model, [calibration_of(number, record) for record in able])
    return model


def update_of(method: QuantizedMethod, model: GlobalModel, record: ClientRecord) -> Update:
    """What a stand-in gives back for what the method sends it."""
    sent = method.assign(model, record)
    payload = encode_model(GRAPH, sent.layers, sent.side)
    plan = plan_to_message(sent.plan)
    assignment = pb.Assignment(round=sent.round, client=record.client, run_id="r", plan=plan)
    update = encode_update(GRAPH, "r", nudge(GRAPH, assignment, payload, record.samples))
    return decode_update(GRAPH, update)[1]


def calibration_of(number: int, record: ClientRecord) -> Calibration:
    """What a stand-in measures after round `number`."""
    assignment = pb.Assignment(round=number, client=record.client)
    data = encode_calibration(GRAPH, "r", made_up(GRAPH, assignment, b"", record.samples))
    return decode_calibration(GRAPH, data)[1]


class Federation:
    """One server over a folder; it may be stopped, crashed and started again."""

    def __init__(self, folder: Path, url: str | None = None, max_clients: int = 100) -> None:
        self.folder = folder
        self.clock_error = 0.0
        """Seconds by which the server's wall clock is wrong."""
        self.later = 0.0
        """Seconds that have passed for the server and not for the test."""
        self.url = url or sqlite_url(folder / "fedmpq.db")
        self._max_clients = max_clients
        self._port = 0
        self._conducting: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(THREADS)
        asyncio.get_running_loop().set_default_executor(self._threads)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def steady(self) -> float:
        return time.monotonic() + self.later

    def pass_time(self, seconds: float) -> None:
        self.later += seconds
        self.connections.changed.ring()

    @property
    def histories(self) -> Path:
        """Where the stand-ins of `clients` write down what they are told."""
        return self.folder / "histories"

    async def start(self) -> None:
        self.store = await asyncio.to_thread(open_store, self.url)
        blobs = open_own_blobs(self.store, None, self.folder / "blobs")
        self.connections = Connections(self._max_clients, self.steady)
        exports = Exports(self.folder, str(self.folder / "blobs"))
        self.uploads = Uploads(self.folder / "uploads")
        outgoing = Outgoing(self.folder / "outgoing")
        self.coordinator = Coordinator(
            self.store,
            blobs,
            outgoing,
            self.connections,
            exports,
            self.uploads,
            clock=lambda: time.time() + self.clock_error,
            steady=self.steady,
        )
        service = FederationService(self.coordinator)
        self._server = grpc.aio.server(options=OPTIONS)
        federation_pb2_grpc.add_FederationServicer_to_server(service, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()
        self._conducting = asyncio.create_task(self.coordinator.conduct(exit_when_done=False))

    async def stop(self) -> None:
        self.connections.close_all("stopping")
        await self._server.stop(1)
        self.coordinator.stop()
        assert self._conducting is not None
        await asyncio.wait_for(self._conducting, PATIENCE)
        await self.coordinator.settled()
        self.store.close()

    async def crash(self) -> None:
        """Nothing is said to anyone and nothing more is written, but for what a thread is at."""
        assert self._conducting is not None
        self._conducting.cancel()
        await self._server.stop(0)
        await asyncio.gather(self._conducting, return_exceptions=True)
        await self.coordinator.settled()
        await self._end_threads()
        self.store.close()

    async def _end_threads(self) -> None:
        """A process that ends takes its threads along."""
        threads, self._threads = self._threads, ThreadPoolExecutor(THREADS)
        asyncio.get_running_loop().set_default_executor(self._threads)
        await asyncio.get_running_loop().run_in_executor(None, threads.shutdown)

    def queue(self, config: RunConfig) -> Run:
        weights, side = first_state()
        blobs = self.coordinator.blobs
        graph, model = blobs.put(GRAPH.to_bytes()), blobs.put(pack_model(Tensors(weights, side)))
        names = [str(label) for label in range(5)]
        run = self.store.queue_run(config.name, config.to_dict(), names, graph, model, time.time())
        self.connections.changed.ring()
        return run

    async def clients(self, *budgets: float, samples: int = 10, **more: Any) -> list[StandIn]:
        """Enrolled stand-ins, named so that their order is that of the budgets."""
        token = self.token(uses=None)
        stand_ins = []
        for number, budget in enumerate(budgets):
            name = f"client-{number}"
            facts = {"samples": samples + number, "recorder": self.recorder(name), **more}
            client = StandIn(self.address, name, budget, **facts)
            await client.enrol(token)
            stand_ins.append(client)
        return stand_ins

    def check_histories(self) -> None:
        """What clients were told and what the store has of every run agree; the checker says so.

        A run in which a client that nobody listened to has a place is left out: half of its history is
        unknown.
        """
        weights, side = first_state()
        first = First(GRAPH.to_bytes(), pack_model(Tensors(weights, side)))
        told = read_told(self.histories)
        for run in self.store.list_runs():
            last = self.store.round(run.run_id, run.round).metrics if run.round else {}
            if "undone" in last:
                # What was merged there and taken back cannot be found by merging what counts.
                continue
            stored = self._stored(run)
            seated = {stored.client_ids[seat.client] for each in stored.rounds for seat in each.seats}
            if seated <= told.lines.keys():
                found = violations(told, stored, first)
                assert not found, f"run {run.name!r}:\n" + "\n".join(found)

    def _stored(self, run: Run) -> Stored:
        """All of it as it was at one moment: a merge meanwhile may delete what was read of before."""
        while True:
            before = self.store.run(run.run_id)
            stored = read_stored(self.store, self.folder / "blobs", run.name)
            if self.store.run(run.run_id) == before:
                return stored

    def recorder(self, name: str) -> Recorder:
        """For a stand-in that a test makes itself."""
        return Recorder(self.histories / f"{name}.jsonl")

    def token(self, uses: int | None = 1) -> str:
        token = make_token(datetime.now(timezone.utc), uses=uses)
        self.store.add_token(token.record)
        return token.text

    def model(self, name: str = "small") -> GlobalModel:
        """The global model as it is stored."""
        run = self.store.run_by_name(name)
        assert run is not None
        stored = unpack_model(GRAPH, self.coordinator.blobs.read(run.model))
        records = tuple(member.record for member in self.store.members(run.run_id))
        return stored.after(run.round, run.bit_widths or (), records)

    async def until(self, happened: Any, patience: float = PATIENCE) -> None:
        """Until `happened()` is true; it is asked after every change."""
        end = time.monotonic() + patience
        while True:
            seen = self.connections.changed.count
            if happened():
                return
            assert time.monotonic() < end, "it did not happen"
            await self.connections.changed.wait(seen, 0.5)


@asynccontextmanager
async def federation(folder: Path, **settings: Any) -> AsyncIterator[Federation]:
    """Whatever the test does to it, at the end the histories of its clients agree with its store."""
    server = Federation(folder, **settings)
    await server.start()
    try:
        yield server
        await asyncio.to_thread(server.check_histories)
    finally:
        await server.stop()


async def run_all(clients: Sequence[StandIn]) -> list[str]:
    try:
        return await asyncio.wait_for(asyncio.gather(*(client.run() for client in clients)), PATIENCE)
    finally:
        await close_all(clients)


async def close_all(clients: Sequence[StandIn]) -> None:
    for client in clients:
        await client.close()


def same_model(one: GlobalModel, other: GlobalModel) -> bool:
    """To the bit."""
    return (
        one.round == other.round
        and one.bit_widths == other.bit_widths
        and one.clients == other.clients
        and pack_model(Tensors.of(one)) == pack_model(Tensors.of(other))
    )
