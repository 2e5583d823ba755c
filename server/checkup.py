"""What could keep a server from serving, looked at from its state folder, with a fix for each fault."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from fedmpq import kernels
from fedmpq.server.certificates import TlsFiles, hosts_of, read_certificate
from fedmpq.server.database import SCHEMA_REVISION, make_engine, one_line, revision_of
from fedmpq.server.state_folder import StateFolder
from fedmpq.system import findings
from fedmpq.system.addresses import can_listen, split_address
from fedmpq.system.findings import Finding, fault, good, warning
from fedmpq.system.memory import available_memory, size_text
from fedmpq.system.private_folders import is_open_to_others

LEAST_DISK, WANTED_DISK = 200 << 20, 5 << 30
LEAST_MEMORY, WANTED_MEMORY = 200 << 20, 1 << 30
WANTED_FILES = 10_000
"""A descriptor or two for each board that is connected."""


def server_findings(state: StateFolder, listen: str, now: float | None = None) -> Iterator[Finding]:
    """Everything that can be looked at from here; a server may be running or not."""
    moment = time.time() if now is None else now
    yield findings.clock(moment, Path(kernels.__file__))
    if not state.exists:
        yield fault(
            "state", f"{state.path} is no server's folder", f"fedmpq server init --state {state.path}"
        )
        return
    yield _folder(state)
    yield from findings.examined("database", lambda: _database(state), "start it, or correct STATE/database")
    yield from findings.examined("certificates", lambda: _certificates(state, moment), _RENEWAL)
    yield findings.disk(state.path, LEAST_DISK, WANTED_DISK)
    yield _memory()
    yield _files()
    yield _listening(state, listen)


_RENEWAL = "fedmpq server init --renew, and docs/security.md says what boards need then"


def _folder(state: StateFolder) -> Finding:
    if is_open_to_others(state.path):
        return fault("state", f"others may enter {state.path}", f"chmod 700 {state.path}")
    return good("state", f"{state.path}, closed to others")


def _database(state: StateFolder) -> Iterator[Finding]:
    from sqlalchemy import text
    from sqlalchemy.exc import DBAPIError

    engine = make_engine(state.database_url())
    try:
        place = engine.url.render_as_string(hide_password=True)
        if engine.dialect.name == "sqlite" and not Path(str(engine.url.database)).exists():
            yield good("database", f"{place} is made when the server starts")
            return
        with engine.connect() as connection:
            if (found := revision_of(connection)) != SCHEMA_REVISION:
                yield warning(
                    "database",
                    f"{place} has tables of revision {found}, this version of {SCHEMA_REVISION}",
                    "back it up; a server that starts brings tables of earlier versions to its own",
                )
                return
            clients = connection.execute(text("SELECT count(*) FROM clients WHERE revoked IS NULL")).scalar()
            if engine.dialect.name == "sqlite":
                said = connection.execute(text("PRAGMA quick_check")).scalar()
                if said != "ok":
                    yield fault("database", f"{place} is damaged: {said}", "bring back the last backup")
                    return
        yield good("database", f"{place}, {clients} boards enrolled")
    except DBAPIError as error:
        yield fault("database", one_line(error), "bring back the last backup")
    finally:
        engine.dispose()


def _certificates(state: StateFolder, now: float) -> Iterator[Finding]:
    files = TlsFiles(state.tls)
    if not files.certificate.exists():
        yield warning(
            "certificate", "there is none: boards of other machines cannot come", "fedmpq server init"
        )
        return
    for what, path in (("certificate", files.certificate), ("authority", files.authority)):
        read = read_certificate(path)
        begins, ends = read.not_valid_before_utc.timestamp(), read.not_valid_after_utc.timestamp()
        yield findings.certificate(what, begins, ends, now, _RENEWAL)
    yield good("hosts", f"boards may call it {', '.join(hosts_of(read_certificate(files.certificate)))}")
    for key in (files.key, files.authority_key):
        if key.exists() and is_open_to_others(key):
            yield fault("key", f"others can read {key}", f"chmod 600 {key}")


def _memory() -> Finding:
    free = available_memory()
    if free < LEAST_MEMORY:
        return fault("memory", f"{size_text(free)} free", f"free {size_text(LEAST_MEMORY - free)} at least")
    if free < WANTED_MEMORY:
        return warning("memory", f"{size_text(free)} free", "a gigabyte is on the safe side for most models")
    return good("memory", f"{size_text(free)} free")


def _files() -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < WANTED_FILES:
        return warning(
            "files",
            f"at most {most} may be open, about one for each board",
            "LimitNOFILE=65536 in the service",
        )
    return good("files", "as many may be open as boards connect")


def _listening(state: StateFolder, listen: str) -> Finding:
    host, port = split_address(listen)
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(state.admin_socket))
        except OSError:
            running = False
        else:
            running = True
    if running:
        return good("server", "it is running")
    if can_listen(host, port):
        return good("server", f"it is not running; {listen} is free")
    return fault(
        "server", f"it is not running, and {listen} is taken", "stop what listens there, or --listen"
    )
