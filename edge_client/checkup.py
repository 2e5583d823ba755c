"""What could keep a board from taking part: looked at before it does, with a fix for each fault."""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpq import kernels
from fedmpq.edge_client.channel import BUNDLE_FILES, read_keys
from fedmpq.edge_client.identity import FILE_NAME, load_identity
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.graph import Graph
from fedmpq.system import findings
from fedmpq.system.addresses import is_loopback, split_address
from fedmpq.system.findings import Finding, fault, good, warning
from fedmpq.system.machine import available_cores
from fedmpq.system.memory import available_memory, size_text
from fedmpq.system.private_folders import is_open_to_others
from fedmpq.training.needs import training_needs

CONNECT_SECONDS = 10.0
LEAST_MEMORY, WANTED_MEMORY = 100 << 20, 200 << 20
LEAST_DISK, WANTED_DISK = 50 << 20, 500 << 20


@dataclass(frozen=True)
class BoardPaths:
    """What a board is started with."""

    server: str | None
    bundle: Path | None
    state: Path
    data: str | None


def board_findings(paths: BoardPaths, now: float | None = None) -> Iterator[Finding]:
    """Everything that can be looked at from here, in the order in which it matters."""
    moment = time.time() if now is None else now
    yield findings.clock(moment, Path(kernels.__file__))
    yield _kernels()
    yield _memory(paths.state)
    yield findings.disk(paths.state, LEAST_DISK, WANTED_DISK)
    yield from findings.examined("identity", lambda: _identity(paths), "delete the file and enrol again")
    if paths.bundle is not None:
        bundle = paths.bundle
        renewal = f"have the operator make a new one: fedmpq server bundle {bundle.name} --overwrite"
        yield from findings.examined("keys", lambda: _keys(bundle, moment, renewal), renewal)
    if paths.server is not None:
        yield from findings.examined("server", lambda: _server(paths), "check the address HOST:PORT")
    if paths.data is not None:
        yield from findings.examined(
            "data", lambda: _data(str(paths.data)), "docs/data.md says what can be read"
        )


def _kernels() -> Finding:
    isa, cores = kernels.isa(), available_cores()
    if isa == "scalar":
        return warning(
            "kernels",
            "scalar: this processor's own instructions are not used",
            "install the wheel of its kind",
        )
    return good("kernels", f"{isa}, {cores} {'core' if cores == 1 else 'cores'}")


def _memory(state: Path) -> Finding:
    """What is free, beside what the model that was trained here last takes."""
    free = available_memory()
    words, least, wanted = f"{size_text(free)} free", LEAST_MEMORY, WANTED_MEMORY
    graphs = sorted((state / "graphs").glob("*"), key=lambda path: path.stat().st_mtime)
    if graphs:
        needed = training_needs(Graph.from_bytes(graphs[-1].read_bytes()), TrainingPlan(), 10_000, 1).memory
        words += f"; the last model took some {size_text(needed)}"
        least, wanted = least + needed, wanted + needed
    if free < least:
        return fault(
            "memory", words, f"free {size_text(least - free)}, or take a smaller batch_size in run.toml"
        )
    if free < wanted:
        return warning("memory", words, "stop what else runs here")
    return good("memory", words)


def _identity(paths: BoardPaths) -> Iterator[Finding]:
    state = paths.state
    if not os.access(findings.nearest(state), os.W_OK):
        yield fault("state", f"{state} cannot be written", "give --state DIR, or change its owner")
    found = load_identity(state / FILE_NAME)
    if found is not None:
        yield good("identity", f"enrolled as client {found.client_id}")
        return
    token = None if paths.bundle is None else paths.bundle / "token"
    if token is not None and token.is_file():
        yield good("identity", "not enrolled yet; the bundle has a token for that")
    else:
        yield warning(
            "identity", "not enrolled, and no token here", "start it once with --bundle or --token-file"
        )


def _keys(bundle: Path, now: float, renewal: str) -> Iterator[Finding]:
    if missing := [name for name in BUNDLE_FILES[:3] if not (bundle / name).is_file()]:
        yield fault("keys", f"{bundle} has no {missing[0]}", "copy the server's whole folder again")
        return
    authority, certificate, key = (bundle / name for name in BUNDLE_FILES[:3])
    read_keys(authority, certificate, key)
    if is_open_to_others(key):
        yield warning("key", f"others can read {key}", f"chmod 600 {key}")
    for what, path in (("certificate", certificate), ("authority", authority)):
        begins, ends = _span(path)
        yield findings.certificate(what, begins, ends, now, renewal)


def _span(path: Path) -> tuple[float, float]:
    """From when to when a certificate is good."""
    # The standard library reads certificates it is shown by a server; of files only this function does.
    facts: dict[str, Any] = ssl._ssl._test_decode_cert(str(path))  # type: ignore[attr-defined]
    return ssl.cert_time_to_seconds(facts["notBefore"]), ssl.cert_time_to_seconds(facts["notAfter"])


def _server(paths: BoardPaths) -> Iterator[Finding]:
    host, port = split_address(str(paths.server))
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        yield fault("name", f"{host} is not known ({error.strerror})", "check the name, and this board's DNS")
        return
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_SECONDS)
    except OSError as error:
        reached = addresses[0][4][0]
        yield fault(
            "server",
            f"{host}:{port} ({reached}) does not answer: {error.strerror or error}",
            "start it there with --listen 0.0.0.0:PORT, and let the port through its firewall",
        )
        return
    with connection:
        if paths.bundle is None:
            if is_loopback(host):
                yield good("server", f"{host}:{port} answers; without TLS, on this machine")
            else:
                yield warning("server", f"{host}:{port} answers; TLS was not tried", "give --bundle DIR")
            return
        yield _handshake(connection, host, paths.bundle)


def _handshake(connection: socket.socket, host: str, bundle: Path) -> Finding:
    authority, certificate, key = (bundle / name for name in BUNDLE_FILES[:3])
    context = ssl.create_default_context(cafile=str(authority))
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    try:
        with context.wrap_socket(connection, server_hostname=host) as secure:
            # With TLS 1.3 the server tells what it thinks of our certificate after the handshake.
            secure.settimeout(1.0)
            try:
                heard = secure.recv(1)
            except TimeoutError:
                heard = b"?"
            if not heard:
                raise ssl.SSLError("the server ended the connection")
            return good("server", f"{host} answers with TLS, and both sides know each other")
    except ssl.SSLCertVerificationError as error:
        return fault(
            "server",
            f"its certificate is not to be trusted here: {error.verify_message}",
            "use its address as `fedmpq server init --host` was told it, and the ca.pem of the same server",
        )
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        return fault(
            "server",
            f"TLS failed: {reason}",
            "does it serve TLS, and is this bundle made by it and not revoked?",
        )


def _data(spec: str) -> Iterator[Finding]:
    from fedmpq.data.named import open_named

    source = open_named(spec)
    splits = source.splits()
    if not splits:
        yield fault("data", f"{spec} holds nothing that can be read", "docs/data.md says what can be")
        return
    yield good("data", f"{spec}: {', '.join(splits)} can be opened")
