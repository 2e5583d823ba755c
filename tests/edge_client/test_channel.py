"""Where the server is and whether the way there is safe."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedmpq.edge_client.channel import ChannelError, TlsKeys, make_endpoint, read_keys
from fedmpq.server import certificates

KEYS = TlsKeys(b"ca", b"certificate", b"secret key")


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:1", "127.3.2.1:1", "[::1]:1"])
def test_this_machine_needs_no_tls(address: str) -> None:
    assert make_endpoint(address, None).keys is None


@pytest.mark.parametrize("address", ["10.0.0.1:1", "board.lab:1", "[fe80::1]:1", "localhost.example.com:1"])
def test_another_machine_does(address: str) -> None:
    with pytest.raises(ChannelError) as caught:
        make_endpoint(address, None)
    assert "--bundle" in str(caught.value)
    assert "--insecure" in str(caught.value)
    assert make_endpoint(address, None, insecure=True).keys is None
    assert make_endpoint(address, KEYS).keys == KEYS


def test_insecure_and_keys_contradict_each_other() -> None:
    with pytest.raises(ChannelError, match="leave one of them out"):
        make_endpoint("10.0.0.1:1", KEYS, insecure=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    authority = certificates.make_authority()
    (folder / "ca.pem").write_bytes(certificates.pem_of(authority.certificate))
    for name in ("client", "other"):
        certificates.issue_client(authority, name).write(folder, name)
    return folder


def test_keys_come_from_files(bundle: Path) -> None:
    ca, certificate, key = (bundle / name for name in ("ca.pem", "client.pem", "client.key"))
    assert read_keys(None, None, None) is None
    assert read_keys(ca, None, None) == TlsKeys(ca.read_bytes())
    keys = read_keys(ca, certificate, key)
    assert keys == TlsKeys(ca.read_bytes(), certificate.read_bytes(), key.read_bytes())
    assert "PRIVATE KEY" not in repr(keys)


def test_keys_that_do_not_fit_are_found_before_any_connection(bundle: Path, tmp_path: Path) -> None:
    ca, certificate, key = (bundle / name for name in ("ca.pem", "client.pem", "client.key"))
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for pair in ((certificate, None), (None, key)):
        with pytest.raises(ChannelError, match="belong together"):
            read_keys(ca, *pair)
    with pytest.raises(ChannelError, match=r"broken\.pem is no certificate"):
        read_keys(broken, None, None)
    for other, its_key in ((certificate, bundle / "other.key"), (broken, key), (certificate, broken)):
        with pytest.raises(ChannelError, match="are no pair"):
            read_keys(ca, other, its_key)
    with pytest.raises(FileNotFoundError):
        read_keys(tmp_path / "nothing.pem", None, None)
