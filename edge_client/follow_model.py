"""`fedmpq client --fetch-model FORMAT --follow`: this board keeps running the version that it is to have.

A new version is downloaded beside the one there is, checked, and only then switched to:

    OUT/NAME-vN.onnx, NAME-vN.onnx.json     version N and its card; the one before it stays too
    OUT/current.onnx                        a link to the one that is to be used, replaced in one step
    OUT/.followed-FORMAT.json               which that is, and how many checks it has passed and failed

The server hears how each check went. A version that fails the first is not switched to. One that fails a
later check stays where it is until the server offers another, for it may be the data that changed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import grpc.aio

from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.channel import Endpoint, Federation, federation
from fedmpq.edge_client.chunk_length import ChunkLength
from fedmpq.edge_client.connection import RefusedError, may_help, pause, retry_after, said
from fedmpq.edge_client.fetch_model import EXPORT_SECONDS, download_offer, known_identity
from fedmpq.edge_client.identity import Identity
from fedmpq.edge_client.transfer import Patience, TransferError, within
from fedmpq.proto import federation_pb2 as pb
from fedmpq.system.durable_files import file_digest, flush, write_durably

DEFAULT_EVERY = 3600.0
CHECK_SECONDS = 300.0
MAX_REASON = 300
_REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)

log = logging.getLogger("fedmpq.client")


@dataclass(frozen=True)
class Followed:
    """The version in use, or one that is tried; the counts are of its checks on this board."""

    version: int
    payload: str
    """SHA-256 of the file, in hex."""
    file: str
    ok: int = 0
    errors: int = 0
    reason: str = ""

    def counted(self, failure: str) -> Followed:
        """After one more check."""
        if failure:
            return replace(self, errors=self.errors + 1, reason=failure)
        return replace(self, ok=self.ok + 1)


@dataclass(frozen=True)
class Following:
    """What is followed, where it goes, and how it is checked."""

    wanted: str
    folder: Path
    check: str | None = None
    """A command that is run with the file's path; None: what this board can do by itself."""
    every: float | None = None
    """Seconds between two questions; None: as the server says."""

    @property
    def notes(self) -> Path:
        return self.folder / f".followed-{self.wanted.replace(':', '-')}.json"


class Follower:
    """One board that asks, checks, switches and reports."""

    def __init__(self, following: Following, identity: Identity, retry: Backoff, patience: Patience) -> None:
        self._following = following
        self._identity = identity
        self._retry = retry
        self._patience = patience
        self._chunks = ChunkLength()
        self.current = _remembered(following.notes)
        self._failed: Followed | None = None

    async def ask(self, stub: Federation) -> float:
        """One question and what follows from it; the seconds until the next."""
        request = pb.GetModelRequest(format=self._following.wanted)
        call = stub.GetModel(request, metadata=self._identity.metadata)
        offer = await within(EXPORT_SECONDS, call, "the export")
        tried = await self._tried(stub, offer)
        if offer.version:
            await self._report(stub, tried)
        return self._following.every or float(offer.ask_again_seconds or DEFAULT_EVERY)

    async def _tried(self, stub: Federation, offer: pb.ModelOffer) -> Followed:
        """What is offered, after a check of it; it is in use if it has passed, or was before."""
        known = self._known(offer)
        path = self._following.folder / known.file
        if not _holds(path, offer.payload):
            await download_offer(stub, self._identity, offer, path, self._retry, self._patience, self._chunks)
        failure = await checked(path, self._following.check)
        known = known.counted(failure)
        if self._is_current(known):
            if failure:
                log.error("version %d fails its check: %s", known.version, failure)
            self._remember(known)
        elif failure:
            self._failed = known
            kept = "nothing" if self.current is None else self.current.file
            log.error("version %d is not taken: %s; %s stays in use", known.version, failure, kept)
        else:
            self._switch(known, path)
        return known

    def _known(self, offer: pb.ModelOffer) -> Followed:
        """The offered file with the counts that this board has of it."""
        for each in (self.current, self._failed):
            if each is not None and (each.version, each.payload) == (offer.version, offer.payload.hex()):
                return each
        # The name comes from the server: never a way out of the folder.
        name = Path(offer.file_name).name
        stem, dot, suffix = name.partition(".")
        return Followed(offer.version, offer.payload.hex(), f"{stem}-v{offer.version}{dot}{suffix}")

    def _is_current(self, one: Followed) -> bool:
        current = self.current
        return current is not None and (current.version, current.payload) == (one.version, one.payload)

    def _switch(self, new: Followed, path: Path) -> None:
        former = self.current
        link = path.with_name(f"current{''.join(path.suffixes)}")
        fresh = link.with_name(f".{link.name}.new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(path.name)
        fresh.replace(link)
        flush(path.parent)
        self._remember(new)
        log.info("version %d is in use: %s", new.version, link)
        kept = {new.file} | ({former.file} if former is not None else set())
        stem = path.name.rpartition("-v")[0]
        for old in path.parent.glob(f"{stem}-v*"):
            if old.name.removesuffix(".json").removesuffix(".part") not in kept:
                old.unlink(missing_ok=True)

    def _remember(self, current: Followed) -> None:
        self.current = current
        write_durably(self._following.notes, json.dumps(asdict(current)).encode())

    async def _report(self, stub: Federation, one: Followed) -> None:
        request = pb.ReportModelRequest(
            version=one.version,
            format=self._following.wanted,
            ok=one.ok,
            errors=one.errors,
            reason=one.reason[:MAX_REASON],
            running=self._is_current(one),
        )
        call = stub.ReportModel(request, metadata=self._identity.metadata)
        await within(self._patience.chunk, call, "the report")


async def follow_model(
    endpoint: Endpoint, identity_file: Path, following: Following, retry: Backoff, patience: Patience
) -> None:
    """For ever; only an identity that the server does not take ends it."""
    following.folder.mkdir(parents=True, exist_ok=True)
    follower = Follower(following, known_identity(identity_file), retry.fresh(), patience)
    retry = retry.fresh()
    while True:
        least = 0.0
        try:
            async with endpoint.open() as channel:
                seconds = await follower.ask(federation(channel))
            retry.reset()
            await asyncio.sleep(seconds)
            continue
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSED:
                raise RefusedError(f"{endpoint.address} gave no model: {said(error)}") from None
            # What is refused now may be offered later: a version is tried elsewhere, or the first one made.
            least = retry_after(error) if may_help(error) else min(following.every or 60.0, 60.0)
            cause = said(error)
        except TransferError as error:
            cause = str(error)
        await pause(retry, f"no model came ({cause})", least)


async def checked(path: Path, command: str | None) -> str:
    """Why the file is not to be used; empty: nothing speaks against it.

    `command` is run by the shell with the path as its last word, and says yes with exit code 0. Without one a
    runtime that is installed here loads the file and computes, in a process of its own: it may crash.
    """
    if command is not None:
        return await _run(["/bin/sh", "-c", f'{command} "$@"', "check", str(path)])
    if path.suffix == ".onnx" and importlib.util.find_spec("onnxruntime") is not None:
        bench = ("bench", str(path), "--seconds", "0.01", "--json")
        return await _run([sys.executable, "-m", "fedmpq.cli", *bench])
    return ""


async def _run(words: Sequence[str]) -> str:
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await within(CHECK_SECONDS, process.communicate(), "the check")
    except TransferError as error:
        return str(error)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 0:
        return ""
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"the check ended with {process.returncode}"


def _holds(path: Path, payload: bytes) -> bool:
    try:
        return file_digest(path) == payload
    except FileNotFoundError:
        return False


def _remembered(notes: Path) -> Followed | None:
    """What an earlier process left; none if it cannot be read, for it can all be had again."""
    try:
        return Followed(**json.loads(notes.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
