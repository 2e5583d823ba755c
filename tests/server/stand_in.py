"""A board that speaks the protocol and does not train: what the server's tests talk to it with.

Written by hand from the .proto alone. Its "training" moves a few codes by a rule of the client's number and
the round, so that every update differs and any server must merge the same ones to the same model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np

from fedmpq.exchange.messages import Calibration, Evaluation, Update
from fedmpq.exchange.wire import decode_model, digest, encode_calibration, encode_update
from fedmpq.model.calibration import statistics_names
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import PackedLayer
from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from tests.history.recording import Recorder, RecordingChannel

OPTIONS = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
WELCOME_SECONDS = 2.0
# INTERNAL is what gRPC makes of a write to a server that has just gone.
RETRY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)
Train = Callable[[Graph, pb.Assignment, bytes, int], Update]
Measure = Callable[[Graph, pb.Assignment, bytes, int], Calibration]


def nudge(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Update:
    """The model as it was sent, with a few of the lowest bits turned over and the side tensors scaled; where
    changes are due, those bits alone. Thousands of rounds of it leave a model that boards can have."""
    layers, side = decode_model(graph, payload)
    draws = np.random.default_rng((assignment.client, assignment.round))
    turned = {}
    for name, layer in layers.items():
        carried = assignment.plan.update == "carried"
        planes = np.zeros_like(layer.planes) if carried else layer.planes.copy()
        weights = int(np.prod(graph.weight_shape(name)))
        for index in draws.integers(0, weights, 5):
            planes[0, index // 8] ^= np.uint8(1 << (index % 8))
        turned[name] = PackedLayer(planes, np.ones_like(layer.step) if carried else layer.step)
    scale = np.float32(1 + 0.01 * (draws.random() - 0.5))
    return Update(
        round=assignment.round,
        client=assignment.client,
        samples=samples,
        layers=turned,
        side={name: np.asarray(tensor * scale, np.float32) for name, tensor in side.items()},
        loss=1.0 / assignment.round,
        accuracy=0.5,
        evaluation=Evaluation(samples, samples // 2) if assignment.evaluate else None,
    )


def made_up(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Calibration:
    """Small means and variances below one, by a rule of the client's number and the round."""
    draws = np.random.default_rng((assignment.client, assignment.round))
    shapes = graph.side_shapes()
    found = {name: draws.uniform(0.1, 0.6, shapes[name]) for name in statistics_names(graph)}
    statistics = {name: values.astype(np.float32) for name, values in found.items()}
    evaluation = Evaluation(samples, samples // 2) if assignment.evaluate else None
    return Calibration(assignment.round, assignment.client, samples, statistics, evaluation)


@dataclass
class StandIn:
    """One client; `run` takes part in rounds until its run has ended."""

    address: str
    name: str
    budget: float = 4.0
    samples: int = 10
    identity: str = ""
    credentials: grpc.ChannelCredentials | None = None
    train: Train = nudge
    measure: Measure = made_up
    finished: list[str] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    receipts: dict[int, pb.Receipt] = field(default_factory=dict)
    """Of its updates, by round."""
    measured: dict[int, pb.Receipt] = field(default_factory=dict)
    """Of its calibrations."""
    bytes_down: int = 0
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    recorder: Recorder | None = None
    """Where its history goes, for `tests.history.checker`."""

    def __post_init__(self) -> None:
        self._channel: grpc.aio.Channel | None = None
        self._graph: Graph | None = None
        self.chunk_bytes = 65536

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            if self.credentials is None:
                self._channel = grpc.aio.insecure_channel(self.address, options=OPTIONS)
            else:
                self._channel = grpc.aio.secure_channel(self.address, self.credentials, options=OPTIONS)
        return self._channel

    @property
    def stub(self) -> federation_pb2_grpc.FederationStub:
        if self.recorder is None:
            return federation_pb2_grpc.FederationStub(self.channel)
        return federation_pb2_grpc.FederationStub(RecordingChannel(self.channel, self.recorder))

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.identity}"),)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def enrol(self, token: str) -> None:
        answer = await self.stub.Enroll(
            pb.EnrollRequest(token=token, name=self.name, budget=self.budget, version="stand-in")
        )
        self.identity = f"{answer.client_id}.{answer.secret}"

    def listen(self) -> grpc.aio.UnaryStreamCall[pb.ListenRequest, pb.Event]:
        self.connected.clear()
        request = pb.ListenRequest(
            budget=self.budget, samples=self.samples, version="stand-in", engine="none"
        )
        stream: grpc.aio.UnaryStreamCall[pb.ListenRequest, pb.Event] = self.stub.Listen(
            request, metadata=self.metadata
        )
        return stream

    async def run(self) -> str:
        """Until a run has ended; how. Connects again when the server was away."""
        while True:
            try:
                return await self._stream()
            except grpc.aio.AioRpcError as error:
                if error.code() not in RETRY:
                    raise
                await self.close()
                await asyncio.sleep(0.05)

    async def _stream(self, welcome_seconds: float = WELCOME_SECONDS) -> str:
        stream = self.listen()
        while True:
            # A connection that a server which is no more had not accepted yet looks open for ever. A server
            # that is slow under load needs longer every time, not more connections.
            patience = None if self.connected.is_set() else welcome_seconds
            try:
                event = await asyncio.wait_for(stream.read(), patience)
            except asyncio.TimeoutError:
                stream.cancel()
                await self.close()
                return await self._stream(2 * welcome_seconds)
            assert isinstance(event, pb.Event), "the stream ended without a status"
            kind = event.WhichOneof("event")
            if kind == "welcome":
                self.chunk_bytes = event.welcome.chunk_bytes
                self.connected.set()
            elif kind == "run":
                await self.hear_of(event.run)
            elif kind == "assignment":
                await self.work(event.assignment)
            elif kind == "cancelled":
                self.cancelled.append(event.cancelled.round)
            elif kind == "run_ended":
                self.finished.append(event.run_ended.state)
                stream.cancel()
                return event.run_ended.state

    async def hear_of(self, run: pb.RunDescription) -> None:
        """What every stream begins with."""
        if self._graph is None:
            self._graph = Graph.from_bytes(await self.download(run.graph_id))

    async def work(self, assignment: pb.Assignment) -> None:
        """Train and upload; a round that is over meanwhile is let go."""
        over = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND)
        try:
            payload = await self.download(assignment.payload)
            training = assignment.phase == pb.TRAINING
            answer = self.update(assignment, payload) if training else self.calibration(assignment, payload)
            receipt = await self.upload(assignment.run_id, assignment.round, answer, phase=assignment.phase)
            (self.receipts if training else self.measured)[assignment.round] = receipt
        except grpc.aio.AioRpcError as error:
            if error.code() not in over:
                raise

    def update(self, assignment: pb.Assignment, payload: bytes) -> bytes:
        assert self._graph is not None
        made = self.train(self._graph, assignment, payload, self.samples)
        return encode_update(self._graph, assignment.run_id, made)

    def calibration(self, assignment: pb.Assignment, payload: bytes) -> bytes:
        assert self._graph is not None
        made = self.measure(self._graph, assignment, payload, self.samples)
        return encode_calibration(self._graph, assignment.run_id, made)

    async def download(self, name: bytes, offset: int = 0) -> bytes:
        data = bytearray()
        request = pb.DownloadRequest(payload=name, offset=offset)
        async for chunk in self.stub.Download(request, metadata=self.metadata):
            data += chunk.data
        self.bytes_down += len(data)
        if offset == 0:
            assert digest(bytes(data)) == name
        return bytes(data)

    async def upload(
        self, run_id: str, number: int, data: bytes, offset: int = 0, phase: pb.Phase = pb.TRAINING
    ) -> pb.Receipt:
        header = pb.UploadHeader(
            run_id=run_id,
            round=number,
            payload=digest(data),
            payload_bytes=len(data),
            offset=offset,
            phase=phase,
        )
        return await self.send_upload(header, data[offset:])

    async def send_upload(self, header: pb.UploadHeader, data: bytes) -> pb.Receipt:
        def parts() -> AsyncIterator[pb.UploadRequest]:
            return _parts(header, data, self.chunk_bytes)

        receipt: pb.Receipt = await self.stub.Upload(parts(), metadata=self.metadata)
        return receipt


async def _parts(header: pb.UploadHeader, data: bytes, size: int) -> AsyncIterator[pb.UploadRequest]:
    yield pb.UploadRequest(header=header)
    for start in range(0, len(data), size):
        yield pb.UploadRequest(data=data[start : start + size])


def held_back(client: StandIn) -> asyncio.Event:
    """The client does its work once the event is set."""
    go, work = asyncio.Event(), client.work

    async def wait_first(assignment: pb.Assignment) -> None:
        await go.wait()
        await work(assignment)

    client.work = wait_first  # type: ignore[method-assign]
    return go
