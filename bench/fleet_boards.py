"""Many boards in one process that train nothing: they speak the real protocol over real gRPC.

`python -m bench.fleet_boards` takes part in one run with every identity it is given and writes, as JSON, what
it has noted. Each board has a connection of its own, as real boards have, unless several share one. The
boards of a process share a disk, so the graph is downloaded once; everything else each board does for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np

from bench.process_facts import ProcessFacts
from fedmpq.exchange.messages import Evaluation, Update
from fedmpq.exchange.wire import decode_model, digest, encode_update
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import PackedLayer
from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto import payload_pb2
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc

SAMPLES = 100
CHANGED = 5
"""Codes of each layer that an update moves by one step."""
CONNECTING_AT_ONCE = 64
RETRY_SECONDS = 1.0
OVER = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
"""The round went on without the board."""
OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


@dataclass(frozen=True)
class Moment:
    """The server's processes as they were when a round's first assignment came, or the end of the run."""

    seconds: float
    """Of the steady clock, which all processes of the machine share."""
    cpu_seconds: list[float]
    """Of each of them."""
    resident_bytes: int
    """Of the first."""


@dataclass
class Notes:
    """What the boards of this process have seen."""

    rounds: dict[int, Moment] = field(default_factory=dict)
    ended: Moment | None = None
    updates: dict[int, int] = field(default_factory=dict)
    """Receipts by round."""
    not_ok: dict[str, int] = field(default_factory=dict)
    """Calls that ended with another status than OK, by call and status."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Of payloads."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def nudged(graph: Graph, assignment: pb.Assignment, payload: bytes) -> Update:
    """The model as it was sent with a few codes moved by a step, or that change alone where it is due."""
    layers, side = decode_model(graph, payload)
    draws = np.random.default_rng(list(assignment.payload[:8]))
    carried = assignment.plan.update == "carried"
    changed = {}
    for name, layer in layers.items():
        planes = np.zeros_like(layer.planes) if carried else layer.planes.copy()
        for index in draws.integers(0, int(np.prod(graph.weight_shape(name))), CHANGED):
            planes[0, index // 8] ^= np.uint8(1 << (index % 8))
        changed[name] = PackedLayer(planes, np.ones_like(layer.step) if carried else layer.step)
    evaluation = Evaluation(SAMPLES, SAMPLES // 2) if assignment.evaluate else None
    return Update(
        round=assignment.round,
        client=assignment.client,
        samples=SAMPLES,
        layers=changed,
        side=side,
        loss=1.0 / assignment.round,
        accuracy=0.5,
        evaluation=evaluation,
    )


class Fleet:
    """What the boards of this process share."""

    def __init__(self, server_pids: Sequence[int]) -> None:
        self.notes = Notes()
        self.connecting = asyncio.Semaphore(CONNECTING_AT_ONCE)
        self._server_pids = server_pids
        self._graphs: dict[bytes, asyncio.Future[Graph]] = {}
        self._answers: dict[tuple[int, bytes], payload_pb2.UpdatePayload] = {}

    def saw_round(self, number: int) -> None:
        if number not in self.notes.rounds:
            self.notes.rounds[number] = self._moment()

    def saw_end(self) -> None:
        if self.notes.ended is None:
            self.notes.ended = self._moment()

    def _moment(self) -> Moment:
        facts = [ProcessFacts.of_family(pid) for pid in self._server_pids]
        cpu = [one.cpu_seconds for one in facts]
        return Moment(time.monotonic(), cpu, ProcessFacts.of(self._server_pids[0]).resident_bytes)

    async def graph(self, board: Board, name: bytes) -> Graph:
        """Downloaded by the first board that needs it."""
        if name not in self._graphs:
            self._graphs[name] = asyncio.ensure_future(self._download_graph(board, name))
        return await self._graphs[name]

    async def _download_graph(self, board: Board, name: bytes) -> Graph:
        return Graph.from_bytes(await board.persist("Download", lambda: board.download(name)))

    def answer(self, graph: Graph, assignment: pb.Assignment, payload: bytes) -> bytes:
        """Boards that were sent the same bytes change the same codes; who sends an update is in it."""
        key = assignment.round, assignment.payload
        if (known := self._answers.get(key)) is None:
            update = nudged(graph, assignment, payload)
            known = payload_pb2.UpdatePayload.FromString(encode_update(graph, assignment.run_id, update))
            self._answers[key] = known
        known.client = assignment.client
        return known.SerializeToString(deterministic=True)


class Board:
    """One stand-in."""

    def __init__(self, fleet: Fleet, stub: Any, identity: str, budget: float) -> None:
        self._fleet = fleet
        self._stub = stub
        self._metadata = (("authorization", f"Bearer {identity}"),)
        self._hello = pb.ListenRequest(
            budget=budget, samples=SAMPLES, version="bench", engine="none", answers=True
        )
        self._chunk_bytes = 1 << 14

    async def take_part(self) -> None:
        """Until the run has ended; connects again where a stream breaks."""
        while not await self._listened():
            await asyncio.sleep(RETRY_SECONDS * (1 + random.random()))

    async def _listened(self) -> bool:
        """One stream; whether it told of the run's end."""
        stream = self._stub.Listen(self._hello, metadata=self._metadata)
        try:
            async with self._fleet.connecting:
                # The welcome.
                event = await stream.read()
            while isinstance(event, pb.Event):
                if event.WhichOneof("event") == "run_ended":
                    self._fleet.saw_end()
                    stream.cancel()
                    return True
                await self._hear(event)
                event = await stream.read()
        except grpc.aio.AioRpcError as error:
            self._note("Listen", error)
        return False

    async def _hear(self, event: pb.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "welcome":
            self._chunk_bytes = event.welcome.chunk_bytes
        elif kind == "run":
            self._graph = await self._fleet.graph(self, event.run.graph_id)
            request = pb.ReadyRequest(run_id=event.run.run_id, samples=SAMPLES)
            await self.persist("Ready", lambda: self._stub.Ready(request, metadata=self._metadata))
        elif kind == "assignment":
            self._fleet.saw_round(event.assignment.round)
            await self._work(event.assignment)

    async def _work(self, assignment: pb.Assignment) -> None:
        notes = self._fleet.notes
        try:
            payload = await self.persist("Download", lambda: self.download(assignment.payload))
            answer = self._fleet.answer(self._graph, assignment, payload)
            await self.persist("Upload", lambda: self._upload(assignment, answer))
        except grpc.aio.AioRpcError:
            return
        notes.updates[assignment.round] = notes.updates.get(assignment.round, 0) + 1
        notes.bytes_down += len(payload)
        notes.bytes_up += len(answer)

    async def persist(self, name: str, call: Any) -> Any:
        """What the call gives, tried until it succeeds; raises where the round went on without the board."""
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                self._note(name, error)
                if error.code() in OVER:
                    raise
            await asyncio.sleep(RETRY_SECONDS * (1 + random.random()))

    async def download(self, name: bytes) -> bytes:
        request = pb.DownloadRequest(payload=name)
        chunks = [chunk.data async for chunk in self._stub.Download(request, metadata=self._metadata)]
        data = b"".join(chunks)
        if digest(data) != name:
            raise ValueError(f"payload {name.hex()} came with other bytes")
        return data

    async def _upload(self, assignment: pb.Assignment, data: bytes) -> pb.Receipt:
        header = pb.UploadHeader(
            run_id=assignment.run_id,
            round=assignment.round,
            payload=hashlib.sha256(data).digest(),
            payload_bytes=len(data),
            phase=assignment.phase,
        )
        parts = _parts(header, data, self._chunk_bytes)
        receipt: pb.Receipt = await self._stub.Upload(parts, metadata=self._metadata)
        return receipt

    def _note(self, call: str, error: grpc.aio.AioRpcError) -> None:
        not_ok, what = self._fleet.notes.not_ok, f"{call} {error.code().name}"
        not_ok[what] = not_ok.get(what, 0) + 1


async def _parts(header: pb.UploadHeader, data: bytes, size: int) -> AsyncIterator[pb.UploadRequest]:
    yield pb.UploadRequest(header=header)
    for start in range(0, len(data), size):
        yield pb.UploadRequest(data=data[start : start + size])


async def take_part(
    server: str, server_pids: Sequence[int], identities: Sequence[tuple[str, float]], per_connection: int
) -> Notes:
    """All of them, until the run has ended for each."""
    fleet = Fleet(server_pids)
    channels = [grpc.aio.insecure_channel(server, options=OPTIONS) for _ in identities[::per_connection]]
    stubs: list[Any] = [federation_pb2_grpc.FederationStub(channel) for channel in channels]  # type: ignore[no-untyped-call]
    boards = [
        Board(fleet, stubs[number // per_connection], identity, budget)
        for number, (identity, budget) in enumerate(identities)
    ]
    await asyncio.gather(*(board.take_part() for board in boards))
    await asyncio.gather(*(channel.close() for channel in channels))
    return fleet.notes


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet_boards", description=__doc__)
    parser.add_argument("--server", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--server-pids", type=int, nargs="+", required=True, help="whose CPU time and memory to note"
    )
    parser.add_argument("--identities", type=Path, required=True, help="JSON: a list of [identity, budget]")
    parser.add_argument("--per-connection", type=int, default=1, help="boards that share a connection")
    parser.add_argument("--notes", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    identities = json.loads(arguments.identities.read_text(encoding="ascii"))
    notes = asyncio.run(
        take_part(arguments.server, arguments.server_pids, identities, arguments.per_connection)
    )
    arguments.notes.write_text(json.dumps(notes.as_dict()), encoding="ascii")


if __name__ == "__main__":
    main()
