"""The port that boards connect to: gRPC's options for many of them, TLS, health, and its orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from fedmpq.proto import federation_pb2
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from fedmpq.server.at_work import AtWork
from fedmpq.server.federation_service import FederationService
from fedmpq.server.public_calls import PublicCallLimit
from fedmpq.server.server_settings import ServeError, ServerSettings
from fedmpq.system.addresses import can_listen, join_address, split_address
from fedmpq.system.durable_files import write_durably
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

MESSAGE_BYTES = 1 << 20
STREAMS_PER_CONNECTION = 16
GRACE_SECONDS = 3.0
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


class BoardsPort:
    """The open port."""

    def __init__(self, server: grpc.aio.Server, at_work: AtWork, healthy: Any, address: str) -> None:
        self._server = server
        self._at_work = at_work
        self._healthy = healthy
        self.address = address

    async def tell_health(self, well: bool) -> None:
        """What a balancer is told that asks gRPC's health service."""
        status = health_pb2.HealthCheckResponse
        await self._healthy.set("", status.SERVING if well else status.NOT_SERVING)

    async def stop(self) -> None:
        """No new calls; streams end with UNAVAILABLE; transfers have a moment to finish."""
        await self._healthy.enter_graceful_shutdown()
        stopping = asyncio.ensure_future(self._server.stop(GRACE_SECONDS))
        self._at_work.connections.close_all("stopping")
        await stopping


@asynccontextmanager
async def boards_port(settings: ServerSettings, at_work: AtWork) -> AsyncIterator[BoardsPort]:
    """The boards' port, open."""
    server = grpc.aio.server(
        interceptors=[PublicCallLimit()],
        options=OPTIONS,
        maximum_concurrent_rpcs=4 * settings.max_clients + 64,
    )
    service = FederationService(at_work)
    federation_pb2_grpc.add_FederationServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    add_reflection(server, federation_pb2)
    address = _bind(server, settings)
    await server.start()
    _announce(settings, address)
    listening = settings.state.path / "listening"
    write_durably(listening, f"{address}\n".encode())
    try:
        yield BoardsPort(server, at_work, healthy, address)
    finally:
        listening.unlink(missing_ok=True)
        await server.stop(0)


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


def check_port(listen: str) -> None:
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


def add_reflection(server: grpc.aio.Server, module: Any) -> None:
    names = [service.full_name for service in module.DESCRIPTOR.services_by_name.values()]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
