"""The server put together: state folder, store, listeners, TLS, signals; and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from fedmpq.model.graph import Graph
from fedmpq.proto import administration_pb2, federation_pb2
from fedmpq.proto.fedmpq.v1 import administration_pb2_grpc, federation_pb2_grpc
from fedmpq.server.administration_service import AdministrationService
from fedmpq.server.blobs import Blobs, BlobsAway, Outgoing, Uploads
from fedmpq.server.connections import Connections
from fedmpq.server.coordinator import Coordinator
from fedmpq.server.exports import Exports, check_export
from fedmpq.server.federation_service import FederationService
from fedmpq.server.first_model_process import first_model
from fedmpq.server.leading import Lease, holder_of
from fedmpq.server.own_blobs import open_own_blobs
from fedmpq.server.public_calls import PublicCallLimit
from fedmpq.server.resources import FIRST_RETRY_SECONDS, MOST_RETRY_SECONDS
from fedmpq.server.run_config import (
    ConfigError,
    RunConfig,
    difference,
    images_of,
    load_calibration_data,
    load_test_data,
    make_config,
)
from fedmpq.server.run_settings import OPERATIONAL, other_operation
from fedmpq.server.served_method import served_method
from fedmpq.server.sightings import SightingKeeper
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.store.errors import StoreFailed
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Run
from fedmpq.server.store.sql import open_store
from fedmpq.system.addresses import can_listen, is_loopback, join_address, split_address
from fedmpq.system.durable_files import write_durably
from fedmpq.system.folder_locks import FolderTaken, locked_folder
from fedmpq.system.logs import say
from fedmpq.system.open_files import allow_open_files

log = logging.getLogger("fedmpq.server")

T = TypeVar("T")
DEPOSED = 75
"""Exit code of a server that another has taken over from: started again, it stands by."""
MESSAGE_BYTES = 1 << 20
STREAMS_PER_CONNECTION = 16
GRACE_SECONDS = 3.0
DRAIN_SECONDS = 5.0
FAREWELL_SECONDS = 5.0
IMPATIENCE_SECONDS = 1.0
WORKERS = 4
SPARE_FILES = 200
"""Beside the boards' connections: the database, payloads, the operator's calls, libraries."""
PENDING_CALLS = 1 << 20
"""Calls that have come and that the server has not begun; clients and calls are limited elsewhere."""
PENDING_SECONDS = 600
_SECOND = 1000
OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
    ("grpc.server_handshake_timeout_ms", 20 * _SECOND),
    # The calls of a fleet that answers at once wait here. Beyond this many, or after this time, gRPC ends
    # them as CANCELLED before the server has seen them.
    ("grpc.server.max_pending_requests", PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS),
    ("grpc.server_max_unrequested_time_in_server", PENDING_SECONDS),
    # Two servers on one port would each get half of the boards.
    ("grpc.so_reuseport", 0),
    # A board that lost its power is noticed after this; boards may ask more often.
    ("grpc.keepalive_time_ms", 60 * _SECOND),
    ("grpc.keepalive_timeout_ms", 20 * _SECOND),
    ("grpc.http2.ping_timeout_ms", 20 * _SECOND),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5 * _SECOND),
    # Measuring the bandwidth costs pings with every transfer, and larger buffers for every board.
    ("grpc.http2.bdp_probe", 0),
)


class ServeError(ValueError):
    """A server that cannot start as it was told to."""


@dataclass(frozen=True)
class TlsSettings:
    certificate: Path
    key: Path
    client_authority: Path | None
    """Clients must show a certificate it signed; None: none is asked for."""

    def credentials(self) -> grpc.ServerCredentials:
        authority = None if self.client_authority is None else self.client_authority.read_bytes()
        pair = self.key.read_bytes(), self.certificate.read_bytes()
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=authority is not None)

    @property
    def words(self) -> str:
        return "TLS" if self.client_authority is None else "mutual TLS"


@dataclass(frozen=True)
class ServerSettings:
    state: StateFolder
    listen: str
    tls: TlsSettings | None
    insecure: bool
    """Serve more than loopback without TLS."""
    runs: tuple[RunConfig, ...]
    exit_when_done: bool
    blobs: str | None
    """A folder or an fsspec URL; None: in the state folder."""
    metrics_port: int | None
    max_clients: int
    lease_seconds: float
    """After so long one that stands by takes over from a leader that is gone."""


def run_server(settings: ServerSettings) -> int:
    """Serve until a signal, or until the last run has ended if so told; the process's exit code."""
    check_listen(settings)
    os.umask(0o077)
    settings.state.create()
    _allow_connections(settings.max_clients)
    try:
        with locked_folder(settings.state.path):
            _check_port(settings.listen)
            return asyncio.run(_serve(settings))
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


def check_listen(settings: ServerSettings) -> None:
    """Without TLS anyone on the way can read and change everything, so that must be asked for by name."""
    host, _ = split_address(settings.listen, lowest_port=0)
    if settings.tls is None and not settings.insecure and not is_loopback(host):
        raise ServeError(
            f"--listen {settings.listen} reaches beyond this machine, and there is no TLS; make certificates "
            "(fedmpq server init), or say --insecure"
        )


class RunQueue:
    """Where runs come from: a config's name is a run's name, and the same config again is the same run."""

    def __init__(self, store: Store, blobs: Blobs, wake: Callable[[], None]) -> None:
        self._store = store
        self._blobs = blobs
        self._wake = wake
        self._lock = asyncio.Lock()

    async def add(self, config: RunConfig, *, again: bool = False) -> Run:
        """The run of that name, if it has the same config, or else a new one.

        `again`: a server that is started anew with a run's file. The operational settings that the run has
        by then hold, for the operator may have changed them.
        """
        async with self._lock:
            known = await asyncio.to_thread(self._store.run_by_name, config.name)
            if known is not None:
                ignored = OPERATIONAL if again else ()
                if (change := difference(make_config(known.config), config, ignored)) is not None:
                    raise ConfigError(
                        f"a run named {config.name!r} was made with other settings ({change}); "
                        "give this one another name, or change that one with fedmpq runs set"
                    )
                for name, words in other_operation(known, config).items():
                    what = f"{name}: {words}; fedmpq runs set {known.name} {name}=... changes it"
                    say(log, what, level=logging.WARNING, run=known.name)
                return known
            test = await asyncio.to_thread(load_test_data, config)
            images = images_of(config, test)
            # Images that the model cannot read are refused before the run begins.
            await asyncio.to_thread(load_calibration_data, config, images.form)
            await check_export(config)
            graph, model = await first_model(config, images)
            # A method that cannot be served is refused here, and not when its turn has come.
            served_method(config, Graph.from_bytes(graph))
            run = await asyncio.to_thread(self._store_run, config, images.class_names, graph, model)
        say(log, "run queued", run=run.name, run_id=run.run_id)
        self._wake()
        return run

    def _store_run(self, config: RunConfig, class_names: Sequence[str], graph: bytes, model: bytes) -> Run:
        with self._blobs.lock:
            names = self._blobs.put(graph), self._blobs.put(model)
            return self._store.queue_run(config.name, config.to_dict(), class_names, *names, time.time())


async def _serve(settings: ServerSettings) -> int:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(WORKERS, thread_name_prefix="work"))
    stopped = asyncio.Event()
    _on_signals(loop, stopped)
    async with AsyncExitStack() as stack:
        store = await _tried("the database", partial(open_store, settings.state.database_url()), stopped)
        if store is None:
            return 0
        stack.callback(store.close)
        lease = Lease(store, holder_of(settings.state.path), settings.lease_seconds)
        if not await lease.take(stopped):
            return 0
        stack.push_async_callback(lease.end)
        lease.keep(stopped.set)
        blobs = await _tried(
            "the payloads", partial(open_own_blobs, store, settings.blobs, settings.state.blobs), stopped
        )
        if blobs is None:
            return 0
        if settings.blobs is None and store.fact("blobs"):
            say(log, "payloads are where they were", blobs=blobs.location)
        connections = Connections(settings.max_clients)
        exports = Exports(settings.state.path, blobs.location)
        coordinator = Coordinator(
            store,
            blobs,
            Outgoing(settings.state.path / "outgoing"),
            connections,
            exports,
            Uploads(settings.state.uploads),
        )
        queue = RunQueue(store, blobs, connections.changed.ring)
        if settings.metrics_port is not None:
            stack.callback(_serve_metrics(coordinator, settings.metrics_port))
        runs = [await queue.add(config, again=True) for config in settings.runs]
        keeper = SightingKeeper(store, connections, time.time)
        keeping = asyncio.ensure_future(keeper.keep())
        conducting = asyncio.ensure_future(coordinator.conduct(settings.exit_when_done))
        administration = await stack.enter_async_context(_administration(settings, coordinator, queue.add))
        federation = await stack.enter_async_context(_federation(settings, coordinator))
        await _until(stopped, conducting)
        reason = "another server leads" if lease.deposed else "a signal"
        say(log, "stopping", reason=reason if stopped.is_set() else "all runs have ended")
        if not stopped.is_set():
            await coordinator.farewell(FAREWELL_SECONDS)
        await connections.drain(DRAIN_SECONDS)
        administration()
        await federation()
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


async def _tried(what: str, opening: Callable[[], T], stopped: asyncio.Event) -> T | None:
    """What `opening` gives once it can be reached; None if a signal comes first."""
    delay = FIRST_RETRY_SECONDS
    while True:
        try:
            return await asyncio.to_thread(opening)
        except (StoreFailed, BlobsAway) as error:
            if delay == FIRST_RETRY_SECONDS:
                say(log, f"waiting for {what}", level=logging.ERROR, error=str(error))
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stopped.wait(), delay)
            return None
        delay = min(2 * delay, MOST_RETRY_SECONDS)


def _on_signals(loop: asyncio.AbstractEventLoop, stopped: asyncio.Event) -> None:
    """The first SIGTERM or Ctrl-C ends the server in order; another one, from someone impatient, at once."""

    def restore() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def stop() -> None:
        # Some senders signal the process and its group; both arrive together.
        if not stopped.is_set():
            loop.call_later(IMPATIENCE_SECONDS, restore)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


async def _until(stopped: asyncio.Event, conducting: asyncio.Future[None]) -> None:
    waiting = asyncio.ensure_future(stopped.wait())
    either: set[asyncio.Future[Any]] = {waiting, conducting}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if conducting.done():
        conducting.result()


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
    _add_reflection(server, administration_pb2)
    server.add_insecure_port(target)
    await server.start()
    socket.chmod(0o600)
    try:
        yield service.stop
    finally:
        await server.stop(GRACE_SECONDS)
        socket.unlink(missing_ok=True)


@asynccontextmanager
async def _federation(
    settings: ServerSettings, coordinator: Coordinator
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """The boards' port; yields what stops it."""
    server = grpc.aio.server(
        interceptors=[PublicCallLimit()],
        options=OPTIONS,
        maximum_concurrent_rpcs=4 * settings.max_clients + 64,
    )
    service = FederationService(coordinator)
    federation_pb2_grpc.add_FederationServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    _add_reflection(server, federation_pb2)
    address = _bind(server, settings)
    await server.start()
    _announce(settings, address)
    listening = settings.state.path / "listening"
    write_durably(listening, f"{address}\n".encode())
    try:
        yield partial(_stop_federation, server, coordinator, healthy)
    finally:
        listening.unlink(missing_ok=True)
        await server.stop(0)


async def _stop_federation(server: grpc.aio.Server, coordinator: Coordinator, healthy: Any) -> None:
    """No new calls; streams end with UNAVAILABLE; transfers have a moment to finish."""
    await healthy.enter_graceful_shutdown()
    stopping = asyncio.ensure_future(server.stop(GRACE_SECONDS))
    coordinator.connections.close_all("stopping")
    await stopping


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> str:
    host, _ = split_address(settings.listen, lowest_port=0)
    try:
        if settings.tls is None:
            port = server.add_insecure_port(settings.listen)
        else:
            port = server.add_secure_port(settings.listen, settings.tls.credentials())
    except RuntimeError:
        port = 0
    if port == 0:
        raise ServeError(_no_port(settings.listen))
    return join_address(host, port)


def _check_port(listen: str) -> None:
    """Before anything is queued or swept: a start that cannot serve must leave everything as it was.

    gRPC itself binds later, when boards can be answered.
    """
    if not can_listen(*split_address(listen, lowest_port=0)):
        raise ServeError(_no_port(listen))


def _no_port(listen: str) -> str:
    return f"cannot listen on {listen}; is another server there, or is it not ours?"


def _announce(settings: ServerSettings, address: str) -> None:
    how = settings.tls.words if settings.tls is not None else "without TLS"
    with contextlib.suppress(BrokenPipeError):
        print(f"fedmpq server listening on {address} ({how})", flush=True)
    say(log, "listening", address=address, security=how, version=version("fedmpq"))
    if settings.tls is None and settings.insecure:
        say(log, "no TLS: anyone on the network can read and change what is sent", level=logging.WARNING)


def _add_reflection(server: grpc.aio.Server, module: Any) -> None:
    names = [service.full_name for service in module.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
