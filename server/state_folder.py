"""The folder a server keeps everything in, and where in it things are.

    fedmpq.db        the store, unless it is PostgreSQL
    database         URL of the PostgreSQL database, if `fedmpq server init --database URL` was told one
    blobs/           payloads by their SHA-256
    uploads/         uploads that are not complete
    tls/             ca.pem, ca.key, server.pem, server.key
    bundles/NAME/    ca.pem, client.pem, client.key, token: what the board NAME needs
    operator-token   what the dashboard's buttons need
    admin.sock       where `fedmpq status` and `fedmpq runs` reach the running server

Only its owner may enter it (mode 0700): that is all the authentication the socket has.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from fedmpq.system.durable_files import write_durably
from fedmpq.system.private_folders import closed_folder

DEFAULT_STATE = Path("fedmpq-server")
MAX_SOCKET_PATH = 107
"""Bytes: what the kernel's sockaddr_un holds, without the zero at its end."""


class StateError(ValueError):
    """A folder that cannot be a server's."""


@dataclass(frozen=True)
class StateFolder:
    path: Path

    @property
    def tls(self) -> Path:
        return self.path / "tls"

    @property
    def blobs(self) -> Path:
        return self.path / "blobs"

    @property
    def uploads(self) -> Path:
        return self.path / "uploads"

    @property
    def bundles(self) -> Path:
        return self.path / "bundles"

    @property
    def admin_socket(self) -> Path:
        return self.path / "admin.sock"

    def create(self) -> None:
        """Makes the folder, or closes the one that is there to others.

        A folder of the user's with other things in it is neither taken over nor closed.
        """
        if self.path.is_dir() and not self.exists and any(self.path.iterdir()):
            raise StateError(f"{self.path} is not empty and no server's folder; choose another --state")
        if self.path.exists() and not self.path.is_dir():
            raise StateError(f"{self.path} is a file; choose another --state for the server's folder")
        closed_folder(self.path)

    @property
    def exists(self) -> bool:
        """Whether a server was set up here."""
        return any((self.path / name).exists() for name in ("fedmpq.db", "database", "tls"))

    def require(self) -> None:
        if not self.exists:
            raise StateError(
                f"{self.path} is no server's folder; name it with --state, "
                f"or make it: fedmpq server init --state {self.path}"
            )

    def database_url(self) -> str:
        """Of the store: what `remember_database` was told, or else the SQLite file in this folder."""
        try:
            return (self.path / "database").read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            # Here, so that a folder can be asked whether it is a server's where SQLAlchemy is not installed.
            from fedmpq.server.database import sqlite_url

            return sqlite_url(self.path / "fedmpq.db")

    def remember_database(self, url: str) -> None:
        """Mode 0600, for a URL may hold a password."""
        write_durably(self.path / "database", f"{url}\n".encode())

    def admin_target(self) -> str:
        """gRPC's name for the socket; a relative path where the absolute one is too long for the kernel."""
        absolute = str(self.admin_socket.resolve())
        paths = (absolute, os.path.relpath(absolute))
        path = next((path for path in paths if len(os.fsencode(path)) <= MAX_SOCKET_PATH), None)
        if path is None:
            raise StateError(
                f"{absolute} is too long for a socket ({len(os.fsencode(absolute))} bytes, at most "
                f"{MAX_SOCKET_PATH}); choose a shorter --state, or start from a folder nearer to it"
            )
        return f"unix:{path}"


def add_state_argument(parser: argparse.ArgumentParser) -> None:
    """`--state DIR`, of every command that works on the folder."""
    parser.add_argument(
        "--state",
        type=Path,
        default=DEFAULT_STATE,
        metavar="DIR",
        help="the server's folder (default: %(default)s)",
    )
