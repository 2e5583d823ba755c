"""A development authority and what it signs: the server's certificate and one for each client.

Keys are ECDSA on P-256. The authority may sign only certificates of servers and clients (path length 0). A
server's certificate bears the names and addresses it is reached by, a client's its name as the common name;
neither can stand in for the other (extended key usage). Where an organisation has its own authority, its PEM
files take the place of these: nothing else in the server asks where they came from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from fedmpq.system.durable_files import create_durably, write_durably
from fedmpq.system.private_folders import closed_folder

AUTHORITY_DAYS = 3650
DEFAULT_DAYS = 365
MAX_DAYS = 36500
ALWAYS = ("localhost", "127.0.0.1", "::1")
"""What every server certificate is good for besides the names given."""
BACKDATED = timedelta(days=1)
"""A board's clock may be slow, and a certificate of the future is refused."""

MAX_NAME = 64
"""Of a client; also the most that a common name can hold."""
_CLIENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*", re.ASCII)
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?", re.ASCII)
_MAX_HOST_NAME = 253


class CertificateError(ValueError):
    """A certificate that cannot be made, or a file that is not one."""


@dataclass(frozen=True)
class Authority:
    """Signs; `certificate` is what every party has to know, `key` never leaves the machine."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as the bytes of two PEM files."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, stem: str, *, overwrite: bool = False) -> None:
        """`stem`.key and `stem`.pem. The key comes first: a certificate that is there has its key."""
        write = write_durably if overwrite else create_durably
        write(folder / f"{stem}.key", self.key)
        write(folder / f"{stem}.pem", self.certificate)


@dataclass(frozen=True)
class TlsFiles:
    """Where the server's own authority keeps its files, under STATE/tls."""

    folder: Path

    @property
    def authority(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def authority_key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def certificate(self) -> Path:
        return self.folder / "server.pem"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"

    @property
    def all(self) -> tuple[Path, ...]:
        return self.authority, self.authority_key, self.certificate, self.key


def make_authority(days: int = AUTHORITY_DAYS, now: datetime | None = None) -> Authority:
    """A new authority, known to nobody yet."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _common_name("FedMPQ development authority")
    builder = _builder(name, name, key.public_key(), days, now)
    usage = _key_usage(digital_signature=False, key_cert_sign=True)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def write_authority(authority: Authority, folder: Path, *, overwrite: bool = False) -> None:
    issued = Issued(pem_of(authority.certificate), _pem_of_key(authority.key))
    issued.write(closed_folder(folder), "ca", overwrite=overwrite)


def read_authority(folder: Path) -> Authority:
    """From ca.pem and ca.key; raises CertificateError where they are no pair or the time is over."""
    files = TlsFiles(folder)
    certificate = read_certificate(files.authority)
    try:
        key = serialization.load_pem_private_key(files.authority_key.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"{files.authority_key} is no private key in PEM form: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise CertificateError(f"{files.authority_key} is not the key of {files.authority}; restore the pair")
    return Authority(certificate, key)


def issue_server(
    authority: Authority, hosts: Iterable[str], days: int = DEFAULT_DAYS, now: datetime | None = None
) -> Issued:
    """A certificate for a server that is reached by `hosts`, and on this machine by localhost."""
    names = [_general_name(host) for host in dict.fromkeys([*hosts, *ALWAYS])]
    extension = x509.SubjectAlternativeName(names)
    return _issue(authority, "FedMPQ server", ExtendedKeyUsageOID.SERVER_AUTH, extension, days, now)


def issue_client(
    authority: Authority, name: str, days: int = DEFAULT_DAYS, now: datetime | None = None
) -> Issued:
    """A certificate for the client called `name`; the server ties its identity to this name."""
    return _issue(authority, checked_client_name(name), ExtendedKeyUsageOID.CLIENT_AUTH, None, days, now)


def checked_client_name(name: str) -> str:
    """The name as it is, if a client may be called so; it becomes a folder's name and a common name."""
    if not is_client_name(name):
        raise CertificateError(
            f"{name!r} cannot be a client's name; take letters, digits and '_.-', "
            f"beginning with a letter or digit, at most {MAX_NAME}"
        )
    return name


def is_client_name(name: str) -> bool:
    return len(name) <= MAX_NAME and _CLIENT_NAME.fullmatch(name) is not None


def read_certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise CertificateError(f"{path} is no certificate in PEM form: {error}") from None


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Names and addresses a server's certificate is good for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in names)


def pem_of(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _issue(
    authority: Authority,
    name: str,
    purpose: ObjectIdentifier,
    names: x509.SubjectAlternativeName | None,
    days: int,
    now: datetime | None,
) -> Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = authority.certificate
    subject, end = _common_name(name), issuer.not_valid_after_utc
    builder = _builder(subject, issuer.subject, key.public_key(), days, now, not_beyond=end)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(digital_signature=True, key_cert_sign=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
    builder = builder.add_extension(signer, critical=False)
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return Issued(pem_of(builder.sign(authority.key, hashes.SHA256())), _pem_of_key(key))


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: int,
    now: datetime | None,
    not_beyond: datetime | None = None,
) -> x509.CertificateBuilder:
    now = datetime.now(timezone.utc) if now is None else now
    if not 1 <= days <= MAX_DAYS:
        raise CertificateError(f"a certificate cannot be valid for {days} days; take 1 to {MAX_DAYS}")
    end = now + timedelta(days=days)
    if not_beyond is not None:
        if now >= not_beyond:
            raise CertificateError(f"the authority's time ended on {not_beyond:%Y-%m-%d}; make a new one")
        # A verifier refuses the whole chain once the authority is over: a later date would promise too much.
        end = min(end, not_beyond)
    builder = x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - BACKDATED).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(*, digital_signature: bool, key_cert_sign: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    if len(host) > _MAX_HOST_NAME or not all(_HOST_LABEL.fullmatch(label) for label in labels):
        raise CertificateError(
            f"{host!r} is neither a host name nor an address; give it without scheme and port, "
            "such as fl.example.org or 192.0.2.7"
        )
    return x509.DNSName(host)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
