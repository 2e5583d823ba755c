"""The server put together: state folder, store, listeners, TLS, signals; and its orderly end."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from fedmpq.proto import administration_pb2
from fedmpq.proto.fedmpq.v1 import administration_pb2_grpc
from fedmpq.server.administration_service import AdministrationService
from fedmpq.server.blobs import Outgoing, Uploads
from fedmpq.server.boards_port import GRACE_SECONDS, BoardsPort, add_reflection, boards_port, check_port
from fedmpq.server.connections import Connections
from fedmpq.server.coordinator import Coordinator
from fedmpq.server.exports import Exports
from fedmpq.server.front import serve_front
from fedmpq.server.leading import DEPOSED, Lease, holder_of
from fedmpq.server.led_fronts import LedFronts, far_connections, led_fronts
from fedmpq.server.own_blobs import OwnBlobs, open_own_blobs, require_shared
from fedmpq.server.read_ahead import ReadAhead
from fedmpq.server.roles import check_role, settle_role
from fedmpq.server.run_config import RunConfig
from fedmpq.server.run_queue import RunQueue
from fedmpq.server.server_settings import ServeError, ServerSettings, check_listen
from fedmpq.server.shared_uploads import LedUploads
from fedmpq.server.sightings import SightingKeeper
from fedmpq.server.starting import DRAIN_SECONDS, begin, tried
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Run
from fedmpq.server.store.sql import open_store
from fedmpq.system.folder_locks import FolderTaken, locked_folder
from fedmpq.system.logs import say
from fedmpq.system.open_files import allow_open_files

log = logging.getLogger("fedmpq.server")

FAREWELL_SECONDS = 5.0
SPARE_FILES = 200
"""Beside the boards' connections: the database, payloads, the operator's calls, libraries."""


def run_server(settings: ServerSettings) -> int:
    """Serve until a signal, or until the last run has ended if so told; the process's exit code."""
    check_listen(settings)
    check_role(settings)
    os.umask(0o077)
    settings.state.create()
    _allow_connections(settings.max_clients)
    try:
        with locked_folder(settings.state.path):
            if settings.role != "leader":
                check_port(settings.listen)
            return asyncio.run(serve_front(settings) if settings.role == "front" else _serve(settings))
    except FolderTaken:
        raise ServeError(
            f"a server runs in {settings.state.path} already; stop it, or name another --state"
        ) from None


def _allow_connections(count: int) -> None:
    """Every connection is an open file."""
    if (allowed := allow_open_files(count + SPARE_FILES)) < count + SPARE_FILES:
        say(
            log,
            f"fewer boards than --max-clients {count} can connect: raise the limit of open files",
            level=logging.WARNING,
            open_files=allowed,
            wanted=count + SPARE_FILES,
        )


async def _serve(settings: ServerSettings) -> int:
    stopped, led = begin(), settings.role == "leader"
    async with AsyncExitStack() as stack:
        store = await tried("the database", partial(open_store, settings.state.database_url()), stopped)
        if store is None:
            return 0
        stack.callback(store.close)
        lease = Lease(store, holder_of(settings.state.path), settings.lease_seconds)
        if not await lease.take(stopped):
            return 0
        stack.push_async_callback(lease.end)
        lease.keep(stopped.set)
        await asyncio.to_thread(settle_role, store, settings.role)
        opening = partial(open_own_blobs, store, settings.blobs, settings.state.blobs, shared=led)
        blobs = await tried("the payloads", opening, stopped)
        if blobs is None:
            return 0
        if settings.blobs is None and store.fact("blobs"):
            say(log, "payloads are where they were", blobs=blobs.location)
        if led:
            blobs = ReadAhead(blobs)
            stack.callback(blobs.close)
        coordinator = _coordinator(settings, store, blobs)
        connections = coordinator.connections
        queue = RunQueue(store, blobs, connections.changed.ring, alone=settings.role == "all")
        if settings.metrics_port is not None:
            stack.callback(_serve_metrics(coordinator, settings.metrics_port))
        runs = [await queue.add(config, again=True) for config in settings.runs]
        keeper = SightingKeeper(store, connections, time.time)
        keeping = asyncio.ensure_future(keeper.keep())
        conducting = asyncio.ensure_future(coordinator.conduct(settings.exit_when_done))
        administration = await stack.enter_async_context(_administration(settings, coordinator, queue.add))
        boards = await stack.enter_async_context(_boards(settings, coordinator))
        await _until(stopped, conducting)
        reason = "another server leads" if lease.deposed else "a signal"
        say(log, "stopping", reason=reason if stopped.is_set() else "all runs have ended")
        if not stopped.is_set():
            telling = asyncio.ensure_future(coordinator.farewell(FAREWELL_SECONDS))
            await _until(stopped, telling)
            telling.cancel()
        await connections.drain(DRAIN_SECONDS)
        administration()
        await boards.stop()
        coordinator.stop()
        await conducting
        await coordinator.settled()
        keeping.cancel()
        if lease.deposed:
            return DEPOSED
        await keeper.note()
        if not settings.exit_when_done:
            return 0
        ended = [await asyncio.to_thread(store.run, run.run_id) for run in runs]
    return 1 if any(run.state == "aborted" for run in ended) else 0


def _coordinator(settings: ServerSettings, store: Store, blobs: OwnBlobs) -> Coordinator:
    """One that has the boards' streams itself, or one that leads front-ends which have them."""
    state, led = settings.state, settings.role == "leader"
    if led:
        require_shared(blobs.location, state.blobs)
    return Coordinator(
        store,
        blobs,
        Outgoing(state.path / "outgoing"),
        far_connections() if led else Connections(settings.max_clients),
        Exports(state.path, blobs.location),
        LedUploads(state.uploads, store) if led else Uploads(state.uploads),
        alone=not led,
    )


def _boards(
    settings: ServerSettings, coordinator: Coordinator
) -> AbstractAsyncContextManager[BoardsPort | LedFronts]:
    """Where boards connect to: here, or at front-ends."""
    if settings.role == "leader":
        return led_fronts(settings, coordinator)
    return boards_port(settings, coordinator)


async def _until(stopped: asyncio.Event, done: asyncio.Future[None]) -> None:
    """Until the work is done or was told to stop; what failed is raised."""
    waiting = asyncio.ensure_future(stopped.wait())
    either: set[asyncio.Future[Any]] = {waiting, done}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if done.done():
        done.result()


def _serve_metrics(coordinator: Coordinator, port: int) -> Callable[[], None]:
    from fedmpq.server.metrics import LOOPBACK, serve_metrics

    chosen, stop = serve_metrics(coordinator, port)
    say(log, "metrics", url=f"http://{LOOPBACK}:{chosen}/metrics")
    return stop


@asynccontextmanager
async def _administration(
    settings: ServerSettings, coordinator: Coordinator, queue: Callable[[RunConfig], Awaitable[Run]]
) -> AsyncIterator[Callable[[], None]]:
    """The operator's socket; yields what ends its long calls."""
    socket = settings.state.admin_socket
    target = settings.state.admin_target()
    # One left by a server that was killed; no other can be at work here.
    socket.unlink(missing_ok=True)
    server = grpc.aio.server()
    service = AdministrationService(coordinator, queue)
    administration_pb2_grpc.add_AdministrationServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    add_reflection(server, administration_pb2)
    server.add_insecure_port(target)
    await server.start()
    socket.chmod(0o600)
    try:
        yield service.stop
    finally:
        await server.stop(GRACE_SECONDS)
        socket.unlink(missing_ok=True)
