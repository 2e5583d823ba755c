"""The Administration service: what the operator's commands ask of the server, over its Unix socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from pathlib import Path

import grpc

from fedmpq.proto import administration_pb2 as pb
from fedmpq.proto.fedmpq.v1 import administration_pb2_grpc
from fedmpq.server.coordinator import Coordinator
from fedmpq.server.refusals import Context, answering, refuse
from fedmpq.server.rollout_calls import FAILED, RolloutCalls
from fedmpq.server.run_config import ConfigError, RunConfig, parse_config
from fedmpq.server.store.errors import StoreError, StoreFailed, UnknownRun
from fedmpq.server.store.records import Run
from fedmpq.server.stored_status import (
    add_sighting,
    client_status,
    run_status,
    stored_run,
    stored_status,
    timestamp,
)

STATUS_SECONDS = 0.25
"""Between two messages of a watch."""
Queue = Callable[[RunConfig], Awaitable[Run]]
"""Puts a run at the end of the queue, or raises ConfigError."""


class AdministrationService(RolloutCalls, administration_pb2_grpc.AdministrationServicer):
    def __init__(self, coordinator: Coordinator, queue: Queue) -> None:
        self._coordinator = coordinator
        self._store = coordinator.store
        self._queue = queue
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Ends the watches."""
        self._stopping.set()
        self._coordinator.connections.changed.ring()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.ServerStatus:
        async with answering(context, FAILED):
            return await self._status()

    async def WatchStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> AsyncIterator[pb.ServerStatus]:
        async with answering(context, FAILED):
            while not self._stopping.is_set():
                seen = self._coordinator.connections.changed.count
                yield await self._status()
                await asyncio.sleep(STATUS_SECONDS)
                await self._coordinator.connections.changed.wait(seen)
            await refuse(context, grpc.StatusCode.UNAVAILABLE, "the server is stopping")

    async def StartRun(self, request: pb.StartRunRequest, context: Context) -> pb.RunStatus:
        async with answering(context, FAILED):
            try:
                config = parse_config(request.config, Path(request.folder))
                run = await self._queue(config)
            except ConfigError as error:
                await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return await self._run_status(run)

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        async with answering(context, FAILED):
            runs = await asyncio.to_thread(self._store.list_runs)
            return pb.ListRunsResponse(runs=[await self._run_status(run) for run in runs])

    async def PauseRun(self, request: pb.RunRequest, context: Context) -> pb.RunStatus:
        return await self._change(self._coordinator.controls.pause, request, context)

    async def ResumeRun(self, request: pb.RunRequest, context: Context) -> pb.RunStatus:
        return await self._change(self._coordinator.controls.resume, request, context)

    async def AbortRun(self, request: pb.RunRequest, context: Context) -> pb.RunStatus:
        return await self._change(self._coordinator.controls.abort, request, context)

    async def SetRun(self, request: pb.SetRunRequest, context: Context) -> pb.RunStatus:
        async def configure(run_id: str) -> Run:
            return await self._coordinator.controls.configure(run_id, request.settings, request.defaults)

        return await self._change(configure, pb.RunRequest(run_id=request.run_id), context)

    async def _change(
        self, change: Callable[[str], Awaitable[Run]], request: pb.RunRequest, context: Context
    ) -> pb.RunStatus:
        async with answering(context, FAILED):
            try:
                run = await change(request.run_id)
            except UnknownRun as error:
                await refuse(context, grpc.StatusCode.NOT_FOUND, str(error))
            except StoreError as error:
                await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
            except ConfigError as error:
                await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return await self._run_status(run)

    async def _run_status(self, run: Run) -> pb.RunStatus:
        status = await asyncio.to_thread(stored_run, self._store, run)
        self._add_reason(status)
        return status

    def _add_reason(self, status: pb.RunStatus) -> None:
        active = self._coordinator.active
        if active is not None and status.run_id == active.run.run_id and status.state != "paused":
            said = dict.fromkeys((status.reason, self._coordinator.waiting_for))
            status.reason = "; ".join(words for words in said if words)
        if active is not None and status.run_id == active.run.run_id and self._coordinator.waiting_for:
            # How many have answered an open round changes all the time; it waits since it was opened.
            since = timestamp(self._coordinator.waiting_since)
            status.waiting_since.CopyFrom(status.opened if status.HasField("opened") else since)

    def _remembered(self, failure: str) -> pb.ServerStatus:
        """As much as is known without the database, and what it fails with."""
        active, current = self._coordinator.active, self._coordinator.round
        opened = None if current is None else current.stored
        members = {} if active is None else active.members
        clients = [
            client_status(client, members.get(client.client_id), opened)
            for client in self._coordinator.connections.connected()
        ]
        run = (
            pb.RunStatus(name="", state="unknown") if active is None else run_status(active.run, opened, None)
        )
        run.reason = failure
        return pb.ServerStatus(run=run, clients=clients)

    async def _status(self) -> pb.ServerStatus:
        """What the store knows, and who is connected and doing what."""
        try:
            status = await asyncio.to_thread(stored_status, self._store)
        except StoreFailed as error:
            status = self._remembered(str(error))
        status.server_version = version("fedmpq")
        status.time.FromNanoseconds(time.time_ns())
        self._add_reason(status.run)
        doing = self._coordinator.round.doing if self._coordinator.round is not None else {}
        connections = self._coordinator.connections
        seen = {one.client_id: one for one in connections.sightings(time.time())}
        for client in status.clients:
            connection = connections.get(client.client_id)
            client.connected = connection is not None
            if (sighting := seen.get(client.client_id)) is not None:
                add_sighting(client, sighting)
            if client.state == "selected":
                client.state = doing.get(client.client, "selected")
            if connection is not None and connection.declined:
                client.state, client.reason = "declined", connection.declined
        return status
