"""HOST:PORT, as people write it."""

from __future__ import annotations

import socket

import pytest

from fedmpq.system.addresses import AddressError, can_listen, is_loopback, join_address, split_address


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:50051", ("localhost", 50051)),
        ("192.168.1.10:1", ("192.168.1.10", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("board.lab.example:443", ("board.lab.example", 443)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address",
    [
        *("", "localhost", "8470", ":50051", "[]:80", "host:", "host:0", "host:65536", "host:x", "host:-1"),
        *("host:²", "::1:50051", "[::1:80", "http://a:1"),
    ],
)
def test_what_is_no_address_is_named_with_the_fix(address: str) -> None:
    with pytest.raises(AddressError, match="HOST:PORT") as caught:
        split_address(address)
    assert repr(address) in str(caught.value)


def test_a_server_may_leave_the_port_to_the_system() -> None:
    assert split_address("localhost:0", lowest_port=0) == ("localhost", 0)
    with pytest.raises(AddressError, match=r"0\.\.65535"):
        split_address("localhost:65536", lowest_port=0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1"])
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "fe80::1", "localhost.example.com", ""])
def test_other_machines(host: str) -> None:
    assert not is_loopback(host)


def test_whether_a_port_can_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not can_listen("127.0.0.1", port)
        assert not can_listen("localhost", port)
        assert can_listen("127.0.0.1", 0)
    assert can_listen("127.0.0.1", port)
    assert not can_listen("192.0.2.1", 0), "an address of documents, and of no machine"
    assert not can_listen("no-such-host.invalid", 0)
