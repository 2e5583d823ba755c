"""The connection to the server: kept, lost, and made again with growing pauses.

A status of gRPC is one of three things here: the server refuses this client, whatever it asks (RefusedError);
one request will never be granted (raised as it is); or it may go better another time (tried again).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TypeVar

import grpc
import grpc.aio

from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.channel import Endpoint, Federation, federation
from fedmpq.edge_client.identity import Identity, load_identity, save_identity
from fedmpq.edge_client.transfer import Metadata, StalledError, TransferError, within
from fedmpq.proto import federation_pb2 as pb
from fedmpq.system.free_disk import free_bytes

T = TypeVar("T")
Code = grpc.StatusCode
Attempt = Callable[[Federation, Metadata, Backoff], Awaitable[T]]
"""One try; it resets the Backoff when something moved."""

_REFUSED = (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED, Code.UNIMPLEMENTED)
_NEVER = (Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND)
_NOT_ENROLLED = (*_REFUSED, *_NEVER, Code.ALREADY_EXISTS)

_RETRY_AFTER = "retry-after"
"""The server's trailing metadata with a refusal that is only for now: whole seconds."""
_LONGEST_WAIT = 600.0
_CONFIRMING = 5.0
"""Seconds; a server that ends waits no longer for it either."""

_DISTRUSTED = "it answers, but"

log = logging.getLogger("fedmpq.client")


class RefusedError(RuntimeError):
    """The server does not accept this client; the message says how to mend that."""


async def enrol(
    endpoint: Endpoint, request: pb.EnrollRequest, identity_file: Path, retry: Backoff, patience: float
) -> Identity:
    """The identity in the file; if there is none, the one that the request's token buys."""
    known = load_identity(identity_file)
    if known is not None:
        log.info("this is %s (client %s)", known.name, known.client_id)
        return known
    if not request.token:
        raise RefusedError(
            f"this client is not enrolled yet, there is no {identity_file}: give --bundle DIR, --token T or "
            "--token-file F; on the server, `fedmpq server token` makes a token"
        )
    answer = await _ask_for_identity(endpoint, request, retry.fresh(), patience)
    identity = Identity(answer.client_id, answer.secret, request.name, endpoint.address)
    save_identity(identity_file, identity)
    log.info("enrolled as %s (client %s)", identity.name, identity.client_id)
    return identity


async def _ask_for_identity(
    endpoint: Endpoint, request: pb.EnrollRequest, retry: Backoff, patience: float
) -> pb.EnrollResponse:
    while True:
        least = 0.0
        try:
            async with endpoint.open() as channel:
                return await within(patience, federation(channel).Enroll(request), "the enrolment")
        except grpc.aio.AioRpcError as error:
            if error.code() in _NOT_ENROLLED:
                raise RefusedError(
                    f"{endpoint.address} did not enrol {request.name!r}: {said(error)}"
                ) from None
            cause, least = reason_of(error), retry_after(error)
        except StalledError as error:
            cause = str(error)
        what = "enrols nobody now" if least else "cannot be reached"
        if cause.startswith(_DISTRUSTED):
            what = "is not trusted"
        await pause(retry, f"{endpoint.address} {what} ({cause})", least)


class _Ending(NamedTuple):
    """Why a stream ended."""

    text: str
    over_limit: bool = False
    """A newer stream of the same identity took its place: two such clients must not do so in quick turns."""


class Connection:
    """One Listen stream, opened anew whenever it ends, and the calls that go beside it."""

    def __init__(
        self,
        endpoint: Endpoint,
        identity: Identity,
        identity_file: Path,
        hello: pb.ListenRequest,
        retry: Backoff,
        patience: float,
    ) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._identity_file = identity_file
        self._hello = hello
        self._retry = retry
        self._patience = patience
        self._stub: Federation | None = None
        self._open = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._heard = False

    async def keep_listening(self, hear: Callable[[pb.Event], Awaitable[None]]) -> None:
        """Hands every event to `hear`, for ever; an error of `hear` and a refusal end it."""
        retry = self._retry.fresh()
        while True:
            self._listening = asyncio.create_task(self._listen(hear))
            try:
                await asyncio.wait({self._listening})
            finally:
                self._listening.cancel()
                await asyncio.wait({self._listening})
            why = self._why_ended(self._listening)
            if self._heard and not why.over_limit:
                retry.reset()
            await pause(retry, f"no connection to {self._endpoint.address} ({why.text})")

    async def persist(self, what: str, attempt: Attempt[T]) -> T:
        """Tries until it is done; a status that will never change is raised."""
        retry = self._retry.fresh()
        while True:
            stub = await self._opened()
            try:
                return await attempt(stub, self._identity.metadata, retry)
            except grpc.aio.AioRpcError as error:
                self._raise_if_refused(error)
                if error.code() in _NEVER:
                    raise
                cause = said(error)
            except TransferError as error:
                cause = str(error)
                if isinstance(error, StalledError):
                    # Whatever else goes over this connection waits in vain too.
                    self.renew()
            await pause(retry, f"{what} broke off ({cause})")

    async def confirm(self, run_id: str) -> None:
        """Says that the end of the run was heard. If that fails, the next stream tells of it again."""
        if self._stub is None:
            return
        call = self._stub.Confirm(pb.ConfirmRequest(run_id=run_id), metadata=self._identity.metadata)
        try:
            await within(min(self._patience, _CONFIRMING), call, "the confirmation")
        except (grpc.aio.AioRpcError, StalledError) as error:
            log.debug("run %s: its end could not be confirmed: %s", run_id, error)

    def says_samples(self, samples: int) -> None:
        """From the next stream on this client introduces itself with so many samples."""
        self._hello.samples = samples

    def renew(self) -> None:
        """Opens a new stream in the place of the one there is."""
        if self._listening is not None:
            self._listening.cancel()

    async def _listen(self, hear: Callable[[pb.Event], Awaitable[None]]) -> None:
        self._heard = False
        async with self._endpoint.open() as channel:
            stub = federation(channel)
            self._hello.free_bytes = free_bytes(self._identity_file.parent)
            call = stub.Listen(self._hello, metadata=self._identity.metadata)
            try:
                event = await within(self._patience, call.read(), "the connection")
                self._stub = stub
                self._open.set()
                while isinstance(event, pb.Event):
                    self._heard = True
                    await hear(event)
                    event = await call.read()
            finally:
                self._stub = None
                self._open.clear()
                call.cancel()

    async def _opened(self) -> Federation:
        while self._stub is None:
            await self._open.wait()
        return self._stub

    def _why_ended(self, listening: asyncio.Task[None]) -> _Ending:
        if listening.cancelled():
            return _Ending("a new stream takes the place of the old one")
        error = listening.exception()
        if error is None:
            return _Ending("the server ended the stream")
        if isinstance(error, grpc.aio.AioRpcError):
            self._raise_if_refused(error)
            if error.code() is Code.INVALID_ARGUMENT:
                raise RefusedError(f"{self._endpoint.address} refused this client: {said(error)}")
            return _Ending(reason_of(error), over_limit=error.code() is Code.RESOURCE_EXHAUSTED)
        if isinstance(error, TransferError):
            return _Ending(str(error))
        raise error

    def _raise_if_refused(self, error: grpc.aio.AioRpcError) -> None:
        if error.code() not in _REFUSED:
            return
        fix = {
            Code.UNAUTHENTICATED: f"to enrol again, delete {self._identity_file} and start with a new token",
            Code.PERMISSION_DENIED: "start with the certificate this client enrolled with, or delete "
            f"{self._identity_file} and enrol again with a new token",
            Code.UNIMPLEMENTED: f"is {self._endpoint.address} a server of fedmpq {version('fedmpq')}?",
        }[error.code()]
        raise RefusedError(f"{self._endpoint.address} refused this client: {said(error)}; {fix}")


def may_help(error: grpc.aio.AioRpcError) -> bool:
    """Whether the same call may go better another time."""
    return error.code() not in (*_REFUSED, *_NEVER)


def retry_after(error: grpc.aio.AioRpcError) -> float:
    """The seconds that the server asks to wait before the next try, within reason; 0: it does not say."""
    for key, value in error.trailing_metadata() or ():
        if key == _RETRY_AFTER and isinstance(value, str) and value.isdecimal():
            return min(float(value), _LONGEST_WAIT)
    return 0.0


async def pause(retry: Backoff, what: str, least: float = 0.0) -> None:
    """Waits as long as it is time to, and `least` seconds in any case."""
    seconds = least + retry.pause()
    log.warning("%s; trying again in %.1f s", what, seconds)
    await asyncio.sleep(seconds)


def reason_of(error: grpc.aio.AioRpcError) -> str:
    """Why there is no connection; a server that was reached and not trusted is told from one that was not."""
    text = said(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"{_DISTRUSTED} its certificate is not signed by this client's authority, or is over: give the "
            f"ca.pem or the bundle of this very server, and look at the clock; {text}"
        )
    if "Hostname Verification" in text or "not match" in text:
        return f"{_DISTRUSTED} its certificate is for another name than --server has; {text}"
    return text


def said(error: grpc.aio.AioRpcError) -> str:
    """The server's words, or gRPC's, in one line."""
    details = " ".join((error.details() or "").split())
    # Before these words gRPC only says that no address worked.
    return details.rpartition("last error: ")[2] or error.code().name
