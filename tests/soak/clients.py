"""The clients of a soak: honest ones that stay whatever happens, one that lies, and one that vanishes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import grpc
import grpc.aio

from fedmpq.exchange.messages import Update
from fedmpq.model.graph import Graph
from fedmpq.proto import federation_pb2 as pb
from tests.server.stand_in import StandIn, nudge

# The last is what a client hears that opened a stream while its former one was not known to be gone.
_LATER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)
_PAUSE = 0.1


def lie(graph: Graph, assignment: pb.Assignment, payload: bytes, samples: int) -> Update:
    """An update in somebody else's name."""
    return replace(nudge(graph, assignment, payload, samples), client=assignment.client + 1)


@dataclass
class Steady(StandIn):
    """Takes part until the run has ended; a server that is away or cannot store is asked again."""

    heard: Callable[[int], None] = field(default=lambda number: None)
    """Told of the round of every assignment."""

    async def enrol_at_last(self, token: str) -> None:
        """A server that is away, or whose answer was lost, is asked again."""
        while not self.identity:
            try:
                await self.enrol(token)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _LATER:
                    raise
                await self.close()
                await asyncio.sleep(_PAUSE)

    async def run(self) -> str:
        while True:
            try:
                return await super().run()
            except grpc.aio.AioRpcError as error:
                if error.code() not in _LATER:
                    raise
                await self.close()
                await asyncio.sleep(_PAUSE)

    async def work(self, assignment: pb.Assignment) -> None:
        self.heard(assignment.round)
        await super().work(assignment)


@dataclass
class Liar(Steady):
    """Lies until the server has refused it so often that it is shut out."""

    lies: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        self.train = lie
        self.refused = 0

    async def run(self) -> str:
        running = asyncio.ensure_future(super().run())
        while self.refused < self.lies and not running.done():
            await asyncio.sleep(_PAUSE)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return "shut out"

    async def work(self, assignment: pb.Assignment) -> None:
        try:
            await super().work(assignment)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            self.refused += 1


@dataclass
class Vanishing(Steady):
    """Gets work to do, and is never heard of again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._assigned = asyncio.Event()

    async def run(self) -> str:
        running = asyncio.ensure_future(super().run())
        gone = asyncio.ensure_future(self._assigned.wait())
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await self.close()
        return "vanished"

    async def work(self, assignment: pb.Assignment) -> None:
        self._assigned.set()
        await asyncio.Event().wait()
