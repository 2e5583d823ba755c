"""A server's administration alone, at a real socket: what `fedmpq status` and `fedmpq runs` talk to."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from fedmpq.proto import administration_pb2 as pb
from fedmpq.proto.fedmpq.v1 import administration_pb2_grpc
from fedmpq.server.state_folder import StateFolder

RUN_ID = "0123456789abcdef0123456789abcdef"
OLDER_ID = "0123ffffffffffffffffffffffffffff"


def example_run() -> pb.RunStatus:
    metrics = pb.RoundMetrics(
        round=3,
        deployed_accuracy={"2": 0.5, "10": 0.75},
        mean_deployed_accuracy=0.625,
        measured_by="server",
        loss=1.2345,
        seconds=6.78,
        updates=3,
        rejected=1,
        cut=2,
        bytes_up=1000,
        bytes_down=2000,
        bit_widths=bytes([2, 4, 8]),
    )
    return pb.RunStatus(
        run_id=RUN_ID,
        name="night",
        state="running",
        round=3,
        rounds=20,
        phase="training",
        selected=4,
        updates=1,
        bytes_up=1_234_567,
        bytes_down=7_654_321,
        metrics=metrics,
        created=Timestamp(seconds=1_900_000_000),
    )


def example_status() -> pb.ServerStatus:
    away = pb.ClientStatus(client_id="b" * 32, name="camera-2", client=-1, budget=2.5)
    near = pb.ClientStatus(
        client_id="a" * 32,
        name="camera-1",
        client=7,
        connected=True,
        budget=4,
        samples=12345,
        state="training",
        bit_widths=bytes([2, 3, 4]),
        bytes_up=999,
        bytes_down=1_000_000,
        version="0.1.0",
        engine="native (neon_dot)",
        accuracy=0.875,
    )
    status = pb.ServerStatus(server_version="9.9", run=example_run(), clients=[near, away])
    status.time.FromSeconds(1_900_000_001)
    return status


class Administered(administration_pb2_grpc.AdministrationServicer):
    """Knows two runs, remembers what it was asked for, and hands on what the test puts into `changes`."""

    def __init__(self) -> None:
        self.status = example_status()
        older = pb.RunStatus(run_id=OLDER_ID, name="day", state="finished", round=5, rounds=5)
        self.runs = [example_run(), older]
        self.asked: list[tuple[str, object]] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.changes: queue.Queue[pb.ServerStatus | None] = queue.Queue()

    def GetStatus(self, request: pb.GetStatusRequest, context: grpc.ServicerContext) -> pb.ServerStatus:
        self._refuse(context)
        return self.status

    def WatchStatus(
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ServerStatus]:
        yield self.status
        while (status := self.changes.get()) is not None:
            yield status

    def ListRuns(self, request: pb.ListRunsRequest, context: grpc.ServicerContext) -> pb.ListRunsResponse:
        self._refuse(context)
        return pb.ListRunsResponse(runs=self.runs)

    def StartRun(self, request: pb.StartRunRequest, context: grpc.ServicerContext) -> pb.RunStatus:
        self.asked.append(("start", (request.config, request.folder)))
        self._refuse(context)
        return pb.RunStatus(run_id="f" * 32, name="new", state="waiting", reason="2 before it", rounds=3)

    def PauseRun(self, request: pb.RunRequest, context: grpc.ServicerContext) -> pb.RunStatus:
        return self._changed("pause", request, context, "paused")

    def ResumeRun(self, request: pb.RunRequest, context: grpc.ServicerContext) -> pb.RunStatus:
        return self._changed("resume", request, context, "running")

    def AbortRun(self, request: pb.RunRequest, context: grpc.ServicerContext) -> pb.RunStatus:
        return self._changed("abort", request, context, "aborted")

    def _changed(
        self, verb: str, request: pb.RunRequest, context: grpc.ServicerContext, state: str
    ) -> pb.RunStatus:
        self.asked.append((verb, request.run_id))
        self._refuse(context)
        run = next(run for run in self.runs if run.run_id == request.run_id)
        run.state = state
        return run

    def _refuse(self, context: grpc.ServicerContext) -> None:
        if self.refusal is not None:
            context.abort(*self.refusal)


@contextmanager
def administered(state: Path) -> Iterator[Administered]:
    """The service at the socket of `state`, until the end of the block."""
    servicer = Administered()
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        administration_pb2_grpc.add_AdministrationServicer_to_server(servicer, server)
        assert server.add_insecure_port(StateFolder(state).admin_target())
        server.start()
        try:
            yield servicer
        finally:
            servicer.changes.put(None)
            server.stop(None).wait()
