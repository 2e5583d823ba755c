"""A leader and front-ends on loopback, inside the test's own event loop, on one PostgreSQL database.

They share nothing but the database and the folder of payloads: each has a store of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import grpc.aio

from fedmpq.method.archive import Tensors, pack_model, unpack_model
from fedmpq.method.state import GlobalModel
from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from fedmpq.server.blobs import Outgoing
from fedmpq.server.boards_port import OPTIONS
from fedmpq.server.connections import Connections
from fedmpq.server.coordinator import Coordinator
from fedmpq.server.exports import Exports
from fedmpq.server.federation_service import FederationService
from fedmpq.server.following import Following
from fedmpq.server.led_fronts import LedFronts, far_connections
from fedmpq.server.own_blobs import join_own_blobs, open_own_blobs
from fedmpq.server.presence import PresenceWriter
from fedmpq.server.read_ahead import ReadAhead
from fedmpq.server.roles import settle_role
from fedmpq.server.run_config import RunConfig
from fedmpq.server.shared_uploads import LedUploads, SharedUploads
from fedmpq.server.store.records import Run
from fedmpq.server.store.sql import join_store, open_store
from fedmpq.server.tokens import make_token
from fedmpq.server.wake_ups import WakeUps
from tests.server.small_model import GRAPH, first_state
from tests.server.stand_in import StandIn

LEASE = 600.0
PATIENCE = 60.0


class Led:
    """The leader."""

    def __init__(self, folder: Path, url: str) -> None:
        self.store = open_store(url)
        self.store.lead("leader", LEASE)
        settle_role(self.store, "leader")
        self.blobs = ReadAhead(open_own_blobs(self.store, str(folder / "blobs"), folder / "own", shared=True))
        self.coordinator = Coordinator(
            self.store,
            self.blobs,
            Outgoing(folder / "leader-outgoing"),
            far_connections(),
            Exports(folder, str(folder / "blobs")),
            LedUploads(folder / "leader-uploads", self.store),
            alone=False,
        )
        self._wake_ups = WakeUps(url, "leader", "fronts")
        self.store.wrote = self._wake_ups.tell
        self._fronts = LedFronts(self.coordinator, self._wake_ups)
        self._conducting = asyncio.ensure_future(self.coordinator.conduct(exit_when_done=False))

    async def stop(self) -> None:
        await self._fronts.stop()
        self.coordinator.stop()
        await asyncio.wait_for(self._conducting, PATIENCE)
        await self.coordinator.settled()
        self._wake_ups.stop()
        self.blobs.close()
        self.store.close()

    def queue(self, config: RunConfig) -> Run:
        weights, side = first_state()
        graph, model = self.blobs.put(GRAPH.to_bytes()), self.blobs.put(pack_model(Tensors(weights, side)))
        names = [str(label) for label in range(5)]
        run = self.store.queue_run(config.name, config.to_dict(), names, graph, model, time.time())
        self.coordinator.connections.changed.ring()
        return run

    def token(self) -> str:
        token = make_token(datetime.now(timezone.utc), uses=None)
        self.store.add_token(token.record)
        return token.text

    def model(self) -> GlobalModel:
        (run,) = self.store.list_runs()
        records = tuple(member.record for member in self.store.members(run.run_id))
        return unpack_model(GRAPH, self.blobs.read(run.model)).after(run.round, run.bit_widths, records)


class Front:
    """A front-end."""

    def __init__(self, folder: Path, url: str, number: int) -> None:
        self.store = join_store(url)
        blobs = join_own_blobs(self.store, None, folder / f"own-{number}")
        self.following = Following(
            self.store,
            blobs,
            Outgoing(folder / f"outgoing-{number}"),
            Connections(100),
            Exports(folder, str(folder / "blobs")),
            SharedUploads(folder / f"uploads-{number}", self.store, blobs),
        )
        self._server = grpc.aio.server(options=OPTIONS)
        service = FederationService(self.following)
        federation_pb2_grpc.add_FederationServicer_to_server(service, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._wake_ups = WakeUps(url, "fronts", "leader")
        connections = self.following.connections
        self._writer = PresenceWriter(self.store, connections, f"front-{number}", self.address, LEASE)
        self._tasks = [
            asyncio.ensure_future(self.following.follow(self._wake_ups, lambda well: None)),
            asyncio.ensure_future(self._writer.keep(self._wake_ups.tell)),
        ]

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        self.following.connections.close_all("stopping")
        await self._server.stop(1)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.following.settled()
        await self._writer.end()
        self._wake_ups.stop()
        self.store.close()


@asynccontextmanager
async def two_fronts(folder: Path, url: str) -> AsyncIterator[tuple[Led, list[Front]]]:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(16))
    led = Led(folder, url)
    fronts = [Front(folder, url, number) for number in (0, 1)]
    for front in fronts:
        await front.start()
    try:
        yield led, fronts
    finally:
        for front in fronts:
            await front.stop()
        await led.stop()


@dataclass
class Elsewhere(StandIn):
    """Has its stream at `address`, and makes every other call at another front-end."""

    elsewhere: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._other = StandIn(self.elsewhere, self.name)

    @property
    def stub(self) -> Any:
        return self._other.stub

    def listen(self) -> grpc.aio.UnaryStreamCall[pb.ListenRequest, pb.Event]:
        self.connected.clear()
        request = pb.ListenRequest(
            budget=self.budget, samples=self.samples, version="stand-in", engine="none", answers=True
        )
        stub: Any = federation_pb2_grpc.FederationStub(self.channel)
        stream: grpc.aio.UnaryStreamCall[pb.ListenRequest, pb.Event] = stub.Listen(
            request, metadata=self.metadata
        )
        return stream

    async def hear_of(self, run: pb.RunDescription) -> None:
        """It is ready anew on every stream: one that was told to come back has another."""
        await super().hear_of(run)
        request = pb.ReadyRequest(run_id=run.run_id, samples=self.samples)
        await self.stub.Ready(request, metadata=self.metadata)

    async def close(self) -> None:
        await super().close()
        await self._other.close()
