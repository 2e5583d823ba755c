"""Network addresses as people write them: HOST:PORT, with an IPv6 host in brackets."""

from __future__ import annotations

from errno import EADDRINUSE, EINVAL
from ipaddress import ip_address
from socket import AI_PASSIVE, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, gaierror, getaddrinfo, socket
from typing import Any

HIGHEST_PORT = 65535


class AddressError(ValueError):
    """A text that is no network address."""


def split_address(address: str, *, lowest_port: int = 1) -> tuple[str, int]:
    """The host, without brackets, and the port of HOST:PORT.

    A server may listen on port 0, which lets the system choose one; nobody can connect to it.
    """
    host, colon, port = address.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if in_brackets else host
    if not colon or not bare or (":" in bare and not in_brackets) or "/" in bare:
        raise AddressError(f"{address!r} is no address; write HOST:PORT, such as 192.168.1.10:8470")
    if not (port.isascii() and port.isdigit() and lowest_port <= int(port) <= HIGHEST_PORT):
        raise AddressError(f"{address!r} has no port in {lowest_port}..{HIGHEST_PORT}; write HOST:PORT")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT; the reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether the host is this machine: what is sent there never crosses a network."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def can_listen(host: str, port: int) -> bool:
    """Whether a server could listen there now: no address of the host is taken, and one of them is ours."""
    try:
        found = getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)
    except gaierror:
        return False
    errors = [_error_of_binding(family, address) for family, *_, address in found]
    return EADDRINUSE not in errors and None in errors


def _error_of_binding(family: int, address: Any) -> int | None:
    """The number of the error that binding to the address gives; None if it can be had."""
    try:
        with socket(family, SOCK_STREAM) as probe:
            # As servers do it: connections of an earlier process that linger do not count.
            probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno or EINVAL
    return None
