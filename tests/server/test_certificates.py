"""The authority and what it signs, judged by the TLS of gRPC: who gets a connection and who does not."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.server.certificates import (
    ALWAYS,
    Authority,
    CertificateError,
    Issued,
    TlsFiles,
    checked_client_name,
    hosts_of,
    issue_client,
    issue_server,
    make_authority,
    pem_of,
    read_authority,
    read_certificate,
    write_authority,
)

LONG_AGO = datetime.now(timezone.utc) - timedelta(days=400)
SECONDS = 60.0
METHOD = "/test.Test/WhoAmI"


# What TLS makes of them


class WhoAmI(grpc.GenericRpcHandler):
    """Answers with the common name of the caller's certificate."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            names: Any = context.auth_context()["x509_common_name"]
            return b",".join(names)

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def serving(authority: Authority, server: Issued, address: str = "127.0.0.1") -> Iterator[int]:
    """Port of a server that lets in who has a certificate of `authority`."""
    credentials = grpc.ssl_server_credentials(
        [(server.key, server.certificate)], pem_of(authority.certificate), require_client_auth=True
    )
    with ThreadPoolExecutor(2) as pool:
        process = grpc.server(pool)
        process.add_generic_rpc_handlers((WhoAmI(),))
        port = process.add_secure_port(f"{address}:0", credentials)
        process.start()
        try:
            yield port
        finally:
            process.stop(None).wait()


def call(target: str, authority: Authority, client: Issued | None, name: str | None = None) -> str:
    """What the server answers to a client that trusts `authority`; `name` is whom it wants to reach."""
    credentials = grpc.ssl_channel_credentials(
        pem_of(authority.certificate),
        client.key if client else None,
        client.certificate if client else None,
    )
    options = [("grpc.ssl_target_name_override", name)] if name else []
    with grpc.secure_channel(target, credentials, options) as channel:
        ask: Any = channel.unary_unary(METHOD)
        return str(ask(b"", timeout=SECONDS).decode())


def refusal(target: str, authority: Authority, client: Issued | None, name: str | None = None) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call(target, authority, client, name)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(caught.value.details())


@dataclass(frozen=True)
class Party:
    authority: Authority
    port: int

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def party() -> Iterator[Party]:
    authority = make_authority()
    with serving(authority, issue_server(authority, ["fl.example.org", "192.0.2.7", "*.lab.test"])) as port:
        yield Party(authority, port)


def test_a_client_with_a_certificate_is_known_by_its_name(party: Party) -> None:
    assert call(party.target, party.authority, issue_client(party.authority, "camera-1")) == "camera-1"


@pytest.mark.parametrize("name", ["localhost", "fl.example.org", "192.0.2.7", "north.lab.test"])
def test_the_server_is_believed_under_each_of_its_names(party: Party, name: str) -> None:
    assert call(party.target, party.authority, issue_client(party.authority, "a"), name) == "a"


def test_the_server_is_believed_on_the_sixth_version_of_the_internet() -> None:
    authority = make_authority()
    with serving(authority, issue_server(authority, []), "[::1]") as port:
        if port == 0:
            pytest.skip("this machine has no IPv6")
        assert call(f"[::1]:{port}", authority, issue_client(authority, "a")) == "a"


@pytest.mark.parametrize("name", ["other.example.org", "192.0.2.8", "lab.test", "a.b.lab.test"])
def test_the_server_is_not_believed_under_another_name(party: Party, name: str) -> None:
    refusal(party.target, party.authority, issue_client(party.authority, "a"), name)


def test_no_certificate_no_connection(party: Party) -> None:
    refusal(party.target, party.authority, None)


def test_a_certificate_of_another_authority_is_refused(party: Party) -> None:
    refusal(party.target, party.authority, issue_client(make_authority(), "camera-1"))


def test_a_server_of_another_authority_is_refused(party: Party) -> None:
    refusal(party.target, make_authority(), issue_client(party.authority, "camera-1"))


def test_an_expired_client_is_refused(party: Party) -> None:
    refusal(party.target, party.authority, issue_client(party.authority, "a", days=365, now=LONG_AGO))


def test_an_expired_server_is_refused() -> None:
    authority = make_authority()
    with serving(authority, issue_server(authority, [], days=365, now=LONG_AGO)) as port:
        refusal(f"127.0.0.1:{port}", authority, issue_client(authority, "a"))


def test_nothing_of_an_expired_authority_is_good() -> None:
    authority = make_authority(days=399, now=LONG_AGO)
    server, client = (
        issue_server(authority, [], days=36500, now=LONG_AGO),
        issue_client(authority, "a", days=36500, now=LONG_AGO),
    )
    with serving(authority, server) as port:
        refusal(f"127.0.0.1:{port}", authority, client)
    with pytest.raises(CertificateError, match="ended on"):
        issue_client(authority, "a")


def test_a_stolen_client_certificate_makes_no_server(party: Party) -> None:
    stolen = issue_client(party.authority, "localhost")
    with serving(party.authority, stolen) as port:
        refusal(f"localhost:{port}", party.authority, issue_client(party.authority, "a"))


def test_the_servers_certificate_makes_no_client(party: Party) -> None:
    refusal(party.target, party.authority, issue_server(party.authority, []))


def test_a_clients_key_cannot_sign_another_client(party: Party) -> None:
    stolen = issue_client(party.authority, "camera-1")
    certificate = x509.load_pem_x509_certificate(stolen.certificate)
    key = load_pem_private_key(stolen.key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    forged = issue_client(Authority(certificate, key), "camera-2")
    chain = Issued(forged.certificate + stolen.certificate, forged.key)
    refusal(party.target, party.authority, chain)


# What is in them


def test_the_dates() -> None:
    now = datetime(2030, 5, 1, 12, tzinfo=timezone.utc)
    authority = make_authority(days=100, now=now)
    assert authority.certificate.not_valid_after_utc == now + timedelta(days=100)
    client = x509.load_pem_x509_certificate(issue_client(authority, "a", days=30, now=now).certificate)
    assert client.not_valid_before_utc == now - timedelta(days=1)
    assert client.not_valid_after_utc == now + timedelta(days=30)
    longer = x509.load_pem_x509_certificate(issue_client(authority, "a", days=300, now=now).certificate)
    assert longer.not_valid_after_utc == now + timedelta(days=100)


@pytest.mark.parametrize("days", [0, -1, 36501])
def test_a_certificate_has_a_time(days: int) -> None:
    with pytest.raises(CertificateError, match="take 1 to 36500"):
        make_authority(days)


def test_names_are_there_once_and_keys_are_on_p256() -> None:
    issued = issue_server(make_authority(), ["board.local", "localhost", "board.local", "2001:db8::1"])
    certificate = x509.load_pem_x509_certificate(issued.certificate)
    assert hosts_of(certificate) == ("board.local", "localhost", "2001:db8::1", *ALWAYS[1:])
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"


@pytest.mark.parametrize(
    "host", ["", "a b", "https://x.org", "x.org:443", "-x.org", "x..org", "x.org.", "ü.org", "a" * 64, "*."]
)
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(CertificateError, match="neither a host name nor an address"):
        issue_server(make_authority(), [host])


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", ".hidden", "-rf", "a b", "é", "a\n", "a" * 65]
)
def test_what_is_no_name_of_a_client_is_refused(name: str) -> None:
    with pytest.raises(CertificateError, match="cannot be a client's name"):
        issue_client(make_authority(), name)


@pytest.mark.slow
@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,63}", fullmatch=True))
def test_every_other_name_is_kept_as_it_is(name: str) -> None:
    issued = issue_client(AUTHORITY, checked_client_name(name))
    subject = x509.load_pem_x509_certificate(issued.certificate).subject
    assert [part.value for part in subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [name]


AUTHORITY = make_authority()


# Files


def test_an_authority_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "tls"
    write_authority(AUTHORITY, folder)
    again = read_authority(folder)
    assert again.certificate == AUTHORITY.certificate
    assert again.key.private_numbers() == AUTHORITY.key.private_numbers()
    for path in (folder, folder.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.iterdir()) == ["ca.key", "ca.pem"]


def test_nothing_is_overwritten_unless_told_to(tmp_path: Path) -> None:
    write_authority(AUTHORITY, tmp_path)
    other = make_authority()
    with pytest.raises(FileExistsError):
        write_authority(other, tmp_path)
    assert read_authority(tmp_path).certificate == AUTHORITY.certificate
    assert len(list(tmp_path.iterdir())) == 2
    write_authority(other, tmp_path, overwrite=True)
    assert read_authority(tmp_path).certificate == other.certificate


def test_a_pair_that_is_none_is_refused(tmp_path: Path) -> None:
    write_authority(AUTHORITY, tmp_path)
    files = TlsFiles(tmp_path)
    files.authority_key.write_bytes(issue_client(AUTHORITY, "a").key)
    with pytest.raises(CertificateError, match=r"ca\.key is not the key of .*ca\.pem"):
        read_authority(tmp_path)
    files.authority_key.write_bytes(b"nonsense")
    with pytest.raises(CertificateError, match=r"ca\.key is no private key"):
        read_authority(tmp_path)
    files.authority.write_bytes(b"nonsense")
    with pytest.raises(CertificateError, match=r"ca\.pem is no certificate"):
        read_certificate(files.authority)
