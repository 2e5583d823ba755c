"""How a server is told to serve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from fedmpq.server.run_config import RunConfig
from fedmpq.server.state_folder import StateFolder
from fedmpq.system.addresses import is_loopback, split_address

Role = Literal["all", "leader", "front"]
"""One process that does everything; or one that leads, and any number beside it that boards connect to."""
ROLES: tuple[Role, ...] = ("all", "leader", "front")


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
    """After so long one that stands by takes over from a leader that is gone, and the boards of a front-end
    that is gone count as away."""
    role: Role = "all"


def check_listen(settings: ServerSettings) -> None:
    """Without TLS anyone on the way can read and change everything, so that must be asked for by name."""
    if settings.role == "leader":
        # Boards do not connect to it.
        return
    host, _ = split_address(settings.listen, lowest_port=0)
    if settings.tls is None and not settings.insecure and not is_loopback(host):
        raise ServeError(
            f"--listen {settings.listen} reaches beyond this machine, and there is no TLS; make certificates "
            "(fedmpq server init), or say --insecure"
        )
