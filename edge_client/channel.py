"""The way to the server: where it is, how it is trusted, and when a silent connection counts as dead."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

import grpc
import grpc.aio

from fedmpq.proto import federation_pb2 as pb
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from fedmpq.system.addresses import is_loopback, split_address

MAX_MESSAGE = 4 << 20
"""Bytes; a server's chunks are far smaller."""

BUNDLE_FILES = ("ca.pem", "client.pem", "client.key", "token")


class ChannelError(ValueError):
    """Keys, or the lack of them, with which no connection can be made."""


class Federation(Protocol):
    """The methods of the generated stub, which has no types."""

    Enroll: grpc.aio.UnaryUnaryMultiCallable[pb.EnrollRequest, pb.EnrollResponse]
    Listen: grpc.aio.UnaryStreamMultiCallable[pb.ListenRequest, pb.Event]
    Download: grpc.aio.UnaryStreamMultiCallable[pb.DownloadRequest, pb.Chunk]
    GetUpload: grpc.aio.UnaryUnaryMultiCallable[pb.GetUploadRequest, pb.UploadStatus]
    Ready: grpc.aio.UnaryUnaryMultiCallable[pb.ReadyRequest, pb.ReadyResponse]
    Confirm: grpc.aio.UnaryUnaryMultiCallable[pb.ConfirmRequest, pb.ConfirmResponse]
    Decline: grpc.aio.UnaryUnaryMultiCallable[pb.DeclineRequest, pb.DeclineResponse]
    Upload: grpc.aio.StreamUnaryMultiCallable[pb.UploadRequest, pb.Receipt]
    GetModel: grpc.aio.UnaryUnaryMultiCallable[pb.GetModelRequest, pb.ModelOffer]
    ReportModel: grpc.aio.UnaryUnaryMultiCallable[pb.ReportModelRequest, pb.ReportModelResponse]


def federation(channel: grpc.aio.Channel) -> Federation:
    make_stub = cast("type[Federation]", federation_pb2_grpc.FederationStub)
    return make_stub(channel)  # type: ignore[call-arg]


@dataclass(frozen=True)
class TlsKeys:
    """PEM bytes: the authority that signed the server, and this client's certificate for mutual TLS."""

    authority: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Endpoint:
    """A server's address with all that a connection to it needs."""

    address: str
    keys: TlsKeys | None = None
    """None means that nothing is encrypted."""
    keepalive_seconds: float = 60.0
    """After so many seconds of silence the server is asked whether it is still there."""
    keepalive_timeout: float = 20.0
    """After so many seconds without an answer the connection is given up."""

    def open(self) -> grpc.aio.Channel:
        """A new connection. It shares nothing with earlier ones: gRPC's own pauses would add to ours."""
        host, _ = split_address(self.address)
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            # A proxy that the environment names does not reach this machine's own addresses.
            ("grpc.enable_http_proxy", 0 if is_loopback(host) else 1),
            ("grpc.keepalive_time_ms", round(1000 * self.keepalive_seconds)),
            # gRPC knows two timeouts, and the one of pings, a minute unless set, decides.
            ("grpc.keepalive_timeout_ms", round(1000 * self.keepalive_timeout)),
            ("grpc.http2.ping_timeout_ms", round(1000 * self.keepalive_timeout)),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.max_receive_message_length", MAX_MESSAGE),
        )
        if self.keys is None:
            return grpc.aio.insecure_channel(self.address, options=options)
        credentials = grpc.ssl_channel_credentials(self.keys.authority, self.keys.key, self.keys.certificate)
        return grpc.aio.secure_channel(self.address, credentials, options=options)


def make_endpoint(address: str, keys: TlsKeys | None, *, insecure: bool = False) -> Endpoint:
    """Refuses to leave this machine without TLS, unless `insecure` says so."""
    host, _ = split_address(address)
    if keys is not None and insecure:
        raise ChannelError("--insecure and TLS keys are given; leave one of them out")
    if keys is None and not insecure and not is_loopback(host):
        raise ChannelError(
            f"{address} is another machine and there is no TLS: give --bundle DIR (or --ca ca.pem), "
            "or --insecure to send the token and all models readable for everyone on the way"
        )
    return Endpoint(address, keys)


def read_keys(ca: Path | None, certificate: Path | None, key: Path | None) -> TlsKeys | None:
    """The PEM files named; None if none is."""
    if (certificate is None) != (key is None):
        raise ChannelError("--cert and --key belong together; give both or none")
    if ca is None and certificate is None:
        return None
    if ca is not None:
        _check_authority(ca)
    if certificate is not None and key is not None:
        _check_pair(certificate, key)
    return TlsKeys(*(None if path is None else path.read_bytes() for path in (ca, certificate, key)))


def _check_authority(path: Path) -> None:
    """Checked here, because gRPC would only say that there is no connection."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise ChannelError(f"{path} is no certificate in PEM form: copy the server's ca.pem again") from None


def _check_pair(certificate: Path, key: Path) -> None:
    try:
        # With a password at hand OpenSSL does not ask for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password="")
    except ssl.SSLError:
        raise ChannelError(
            f"{certificate} and {key} are no pair of a certificate and its key in PEM form, "
            "or the key is encrypted: copy both again"
        ) from None
