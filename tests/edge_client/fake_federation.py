"""A small server that speaks the real protocol over a real socket and does wrong what a test tells it to.

What it holds (identities, payloads, uploads, receipts) outlives a restart, as a real server's store does.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Assignment, TrainingPlan, pack_layers
from fedmpq.exchange.wire import (
    digest,
    encode_calibration,
    encode_model,
    encode_update,
    plan_to_message,
)
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, Side
from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from fedmpq.training.engine import make_engine
from fedmpq.training.local_calibration import run_calibration
from fedmpq.training.local_round import run_local_round

TOKEN = "fmq_token"
RUN = "run-1"
CHUNK = 100
Fault = Callable[[grpc.ServicerContext], None]


@dataclass
class Faults:
    """What goes wrong; each list is used up from its front, one entry a call."""

    enrol: list[Fault] = field(default_factory=list)
    listen: list[Fault] = field(default_factory=list)
    download: list[Callable[[int, grpc.ServicerContext], None]] = field(default_factory=list)
    """Called with the bytes sent so far before every chunk of that call."""
    damage: list[bytes] = field(default_factory=list)
    """Sent in the place of a payload."""
    upload: list[Callable[[int, grpc.ServicerContext], None]] = field(default_factory=list)
    """Called with the bytes stored so far after the header and every chunk of that call."""
    receipt: list[Fault] = field(default_factory=list)
    """Called when an update is stored, before its receipt is given."""
    confirm: list[Fault] = field(default_factory=list)


class FakeFederation(federation_pb2_grpc.FederationServicer):
    """The servicer; `calls` lists what was asked, such as ("Download", offset)."""

    def __init__(self) -> None:
        self.identities: dict[str, str] = {}
        self.names: list[str] = []
        self.payloads: dict[bytes, bytes] = {}
        self.on_stream: list[pb.Event] = []
        """What every new stream begins with after its welcome."""
        self.hellos: list[pb.ListenRequest] = []
        self.uploads: dict[bytes, bytes] = {}
        self.receipts: dict[bytes, pb.Receipt] = {}
        self.calls: list[tuple[str, int]] = []
        self.wished: list[int] = []
        """The length of chunks that every Download asked for."""
        self.phases: list[tuple[str, int]] = []
        """The phase that every GetUpload and Upload named."""
        self.declined: list[pb.DeclineRequest] = []
        self.ready: list[pb.ReadyRequest] = []
        self.confirmed: list[str] = []
        self.is_old = False
        """Whether it does not know Decline, Ready and Confirm."""
        self.faults = Faults()
        self._streams: list[queue.Queue[pb.Event | None]] = []
        self._lock = threading.Lock()

    def send(self, event: pb.Event) -> None:
        """Down every open stream."""
        with self._lock:
            for stream in self._streams:
                stream.put(event)

    @property
    def streams(self) -> int:
        return len(self._streams)

    def count(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)

    def offsets(self, call: str) -> list[int]:
        return [offset for name, offset in self.calls if name == call]

    def complete(self, number: int = 1, phase: pb.Phase = pb.TRAINING) -> list[bytes]:
        """The updates of a round, or its statistics, that have their receipts."""
        wanted = number, phase
        return [self.uploads[name] for name, r in self.receipts.items() if (r.round, r.phase) == wanted]

    # The protocol

    def Enroll(self, request: pb.EnrollRequest, context: grpc.ServicerContext) -> pb.EnrollResponse:
        self.calls.append(("Enroll", 0))
        if self.faults.enrol:
            self.faults.enrol.pop(0)(context)
        if request.token != TOKEN:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such token; make one: fedmpq server token")
        self.names.append(request.name)
        client_id, secret = secrets.token_hex(16), secrets.token_urlsafe(32)
        self.identities[client_id] = secret
        return pb.EnrollResponse(client_id=client_id, secret=secret)

    def Listen(self, request: pb.ListenRequest, context: grpc.ServicerContext) -> Iterator[pb.Event]:
        self._authenticate(context)
        self.hellos.append(request)
        if self.faults.listen:
            self.faults.listen.pop(0)(context)
        stream: queue.Queue[pb.Event | None] = queue.Queue()
        context.add_callback(lambda: stream.put(None))
        with self._lock:
            stream.put(pb.Event(welcome=pb.Welcome(server_version="0.0", chunk_bytes=CHUNK)))
            for first in self.on_stream:
                stream.put(first)
            self._streams.append(stream)
        try:
            while (event := stream.get()) is not None:
                yield event
        finally:
            with self._lock:
                self._streams.remove(stream)

    def Download(self, request: pb.DownloadRequest, context: grpc.ServicerContext) -> Iterator[pb.Chunk]:
        self._authenticate(context)
        self.calls.append(("Download", request.offset))
        self.wished.append(request.chunk_bytes)
        if request.payload not in self.payloads:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such payload")
        data = self.faults.damage.pop(0) if self.faults.damage else self.payloads[request.payload]
        fault = self.faults.download.pop(0) if self.faults.download else None
        for start in range(request.offset, len(data), CHUNK):
            if fault is not None:
                fault(start, context)
            yield pb.Chunk(data=data[start : start + CHUNK])

    def GetUpload(self, request: pb.GetUploadRequest, context: grpc.ServicerContext) -> pb.UploadStatus:
        self._authenticate(context)
        self.calls.append(("GetUpload", 0))
        self.phases.append(("GetUpload", request.phase))
        receipt = self.receipts.get(request.payload)
        return pb.UploadStatus(offset=len(self.uploads.get(request.payload, b"")), receipt=receipt)

    def Upload(self, requests: Iterator[pb.UploadRequest], context: grpc.ServicerContext) -> pb.Receipt:
        self._authenticate(context)
        header = next(requests).header
        name = header.payload
        self.calls.append(("Upload", header.offset))
        self.phases.append(("Upload", header.phase))
        fault = self.faults.upload.pop(0) if self.faults.upload else None
        stored = self.uploads.get(name, b"")[: header.offset]
        if fault is not None:
            fault(len(stored), context)
        for request in requests:
            stored += request.data
            self.uploads[name] = stored
            if fault is not None:
                fault(len(stored), context)
        if digest(stored) != name or len(stored) != header.payload_bytes:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the hash is another")
        if name not in self.receipts:
            receipt_id = secrets.token_hex(8)
            self.receipts[name] = pb.Receipt(
                run_id=header.run_id,
                round=header.round,
                payload=name,
                receipt_id=receipt_id,
                phase=header.phase,
            )
        if self.faults.receipt:
            self.faults.receipt.pop(0)(context)
        return self.receipts[name]

    def Decline(self, request: pb.DeclineRequest, context: grpc.ServicerContext) -> pb.DeclineResponse:
        self._authenticate(context)
        self.calls.append(("Decline", 0))
        if self.is_old:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self.declined.append(request)
        return pb.DeclineResponse()

    def Ready(self, request: pb.ReadyRequest, context: grpc.ServicerContext) -> pb.ReadyResponse:
        self._authenticate(context)
        self.calls.append(("Ready", 0))
        if self.is_old:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        self.ready.append(request)
        return pb.ReadyResponse()

    def Confirm(self, request: pb.ConfirmRequest, context: grpc.ServicerContext) -> pb.ConfirmResponse:
        self._authenticate(context)
        self.calls.append(("Confirm", 0))
        if self.is_old:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if self.faults.confirm:
            self.faults.confirm.pop(0)(context)
        self.confirmed.append(request.run_id)
        return pb.ConfirmResponse()

    def _authenticate(self, context: grpc.ServicerContext) -> None:
        metadata = dict(context.invocation_metadata())
        client_id, _, secret = str(metadata.get("authorization", "")).removeprefix("Bearer ").partition(".")
        if self.identities.get(client_id) != secret:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no such identity, or it was revoked")


class RunningServer:
    """The servicer on a port of this machine; stopped and started again it keeps the port."""

    def __init__(self, federation: FakeFederation, credentials: grpc.ServerCredentials | None = None) -> None:
        self.federation = federation
        self._credentials = credentials
        self.port = 0
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        options = (
            ("grpc.so_reuseport", 0),
            ("grpc.http2.min_ping_interval_without_data_ms", 100),
        )
        self._server = grpc.server(ThreadPoolExecutor(16), options=options)
        federation_pb2_grpc.add_FederationServicer_to_server(self.federation, self._server)
        where = f"127.0.0.1:{self.port}"
        if self._credentials is None:
            self.port = self._server.add_insecure_port(where)
        else:
            self.port = self._server.add_secure_port(where, self._credentials)
        self._server.start()

    def stop(self) -> None:
        """Cuts every connection."""
        self._server.stop(0).wait()


def cut_after(size: int) -> Callable[[int, grpc.ServicerContext], None]:
    """Ends the call as a broken connection does, once so many bytes have passed."""

    def cut(passed: int, context: grpc.ServicerContext) -> None:
        if passed >= size:
            context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    return cut


def hang_after(size: int, release: threading.Event) -> Callable[[int, grpc.ServicerContext], None]:
    """Moves nothing more, once so many bytes have passed, until it is released."""

    def hang(passed: int, _: grpc.ServicerContext) -> None:
        if passed >= size:
            release.wait(60)

    return hang


def refuse(code: grpc.StatusCode, details: str, retry_after: str | None = None) -> Fault:
    def fail(context: grpc.ServicerContext) -> None:
        if retry_after is not None:
            context.set_trailing_metadata((("retry-after", retry_after),))
        context.abort(code, details)

    return fail


@dataclass(frozen=True)
class Work:
    """A run of one model, and what a client must give back for a round of it."""

    graph: Graph
    layers: Layers
    side: Side
    plan: TrainingPlan
    class_names: tuple[str, ...] = ("a", "b", "c")

    def offer(self, federation: FakeFederation, number: int = 1, **changes: Any) -> list[pb.Event]:
        """The description and the assignment of a round, whose payloads the server then has."""
        graph, model = self.graph.to_bytes(), encode_model(self.graph, pack_layers(self.layers), self.side)
        federation.payloads |= {digest(graph): graph, digest(model): model}
        run = pb.RunDescription(
            run_id=RUN,
            name="small",
            graph_id=digest(graph),
            graph_bytes=len(graph),
            class_names=self.class_names,
            rounds=3,
        )
        assignment = pb.Assignment(
            run_id=RUN,
            round=number,
            client=7,
            seed=5,
            payload=digest(model),
            payload_bytes=len(model),
            plan=plan_to_message(self.plan),
            bit_widths=bytes(layer.bits for layer in self.layers.values()),
        )
        for name, value in changes.items():
            setattr(assignment, name, value)
        return [pb.Event(run=run), pb.Event(assignment=assignment)]

    def update(self, data: Dataset, number: int = 1) -> bytes:
        """What the client gives back, computed here."""
        update = run_local_round(make_engine("native", 1), self.graph, self._assignment(number), data)
        return encode_update(self.graph, RUN, update)

    def calibration(self, data: Dataset, number: int = 1) -> bytes:
        """What the client gives back when it was told to measure, computed here."""
        return encode_calibration(
            self.graph, RUN, run_calibration(self.graph, self._assignment(number), data)
        )

    def _assignment(self, number: int) -> Assignment:
        return Assignment(5, number, 7, pack_layers(self.layers), self.side, self.plan)
