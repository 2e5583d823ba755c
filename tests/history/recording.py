"""What a client was told and what it sent, written down as it crosses the client's own gRPC channel.

A `Recorder` appends JSON lines to one file for each client. A line is in the file before the client acts on
what it says, so a SIGKILL of the client loses nothing that it knew. The kinds are

    assignment, cancelled, run_ended    events of the Listen stream
    receipt                             of an Upload, or inside the answer to GetUpload
    sent                                a piece of an upload, with its bytes
    refused                             the status with which an Upload or a GetUpload ended

`RecordingChannel` is what the generated stub is built on instead of the channel itself: it looks at messages
where they are serialized and parsed, and changes none of them.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fedmpq.edge_client.transfer import wanted_payload
from fedmpq.exchange.wire import phase_from_message
from fedmpq.proto import federation_pb2 as pb

_SERVICE = "/fedmpq.v1.Federation/"
Address = dict[str, Any]


class Recorder:
    """The history of one client; several processes of the same client, one after the other, add to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # One write for each line: lines of a process that is killed are whole or absent.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._calls = itertools.count()
        self._process = f"{os.getpid()}-{id(self)}"

    def write(self, kind: str, client_id: str, **facts: Any) -> None:
        line = json.dumps({"kind": kind, "client_id": client_id, **facts})
        os.write(self._file, f"{line}\n".encode())

    def call(self) -> str:
        """A name for one upload, different from those of all other processes."""
        return f"{self._process}-{next(self._calls)}"

    def close(self) -> None:
        os.close(self._file)

    # What messages say

    def event(self, client_id: str, event: pb.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "assignment":
            told = event.assignment
            payload, payload_bytes = wanted_payload(told)
            self.write(
                kind,
                client_id,
                **_address(told),
                client=told.client,
                seed=told.seed,
                payload=payload.hex(),
                payload_bytes=payload_bytes,
                bit_widths=list(told.bit_widths),
            )
        elif kind == "cancelled":
            self.write(kind, client_id, **_address(event.cancelled), reason=event.cancelled.reason)
        elif kind == "run_ended":
            self.write(kind, client_id, run_id=event.run_ended.run_id, state=event.run_ended.state)

    def receipt(self, client_id: str, receipt: pb.Receipt) -> None:
        facts = {"payload": receipt.payload.hex(), "receipt_id": receipt.receipt_id}
        self.write("receipt", client_id, **_address(receipt), **facts)

    def status(self, client_id: str, status: pb.UploadStatus) -> None:
        if status.HasField("receipt"):
            self.receipt(client_id, status.receipt)


def _address(said: Any) -> Address:
    return {"run_id": said.run_id, "round": said.round, "phase": phase_from_message(said.phase)}


class _Upload:
    """One call of Upload, seen piece by piece."""

    def __init__(self, recorder: Recorder) -> None:
        self.client_id = ""
        self._recorder = recorder
        self._call = recorder.call()
        self._header: pb.UploadHeader | None = None
        self._at = 0

    def sees(self, request: pb.UploadRequest) -> None:
        if request.WhichOneof("part") == "header":
            self._header = request.header
            self._at = request.header.offset
            return
        if self._header is None:
            return
        self._recorder.write(
            "sent",
            self.client_id,
            call=self._call,
            payload=self._header.payload.hex(),
            payload_bytes=self._header.payload_bytes,
            offset=self._at,
            data=base64.b64encode(request.data).decode(),
        )
        self._at += len(request.data)

    def refused(self, code: str, details: str) -> None:
        if self._header is not None and self._header.phase in pb.Phase.values():
            facts = {"payload": self._header.payload.hex(), "code": code, "details": details}
            self._recorder.write("refused", self.client_id, **_address(self._header), **facts)


class RecordingChannel:
    """A channel for `FederationStub` that tells a recorder what passes."""

    def __init__(self, channel: grpc.aio.Channel, recorder: Recorder) -> None:
        self._channel = channel
        self._recorder = recorder
        self._ending: set[asyncio.Task[None]] = set()

    def unary_unary(self, method: str, **options: Any) -> Any:
        if method != f"{_SERVICE}GetUpload":
            return self._channel.unary_unary(method, **options)
        return partial(self._parsed, self._channel.unary_unary, method, options, self._recorder.status)

    def unary_stream(self, method: str, **options: Any) -> Any:
        if method != f"{_SERVICE}Listen":
            return self._channel.unary_stream(method, **options)
        return partial(self._parsed, self._channel.unary_stream, method, options, self._recorder.event)

    def stream_unary(self, method: str, **options: Any) -> Any:
        return partial(self._upload, method, options)

    def _parsed(
        self,
        make: Callable[..., Any],
        method: str,
        options: dict[str, Any],
        record: Callable[[str, Any], None],
        *arguments: Any,
        **more: Any,
    ) -> Any:
        """A call whose answers `record` sees before the caller does."""
        client_id = _identity(more.get("metadata"))
        seen = options | {
            "response_deserializer": _observed(options["response_deserializer"], partial(record, client_id))
        }
        return make(method, **seen)(*arguments, **more)

    def _upload(self, method: str, options: dict[str, Any], *arguments: Any, **more: Any) -> Any:
        upload = _Upload(self._recorder)
        upload.client_id = _identity(more.get("metadata"))
        parse = _observed(options["response_deserializer"], partial(self._recorder.receipt, upload.client_id))
        seen = options | {
            "request_serializer": _observing(options["request_serializer"], upload.sees),
            "response_deserializer": parse,
        }
        call = self._channel.stream_unary(method, **seen)(*arguments, **more)
        call.add_done_callback(partial(self._ended, upload))
        return call

    def _ended(self, upload: _Upload, call: Any) -> None:
        async def note() -> None:
            code = await call.code()
            if code is not grpc.StatusCode.OK:
                upload.refused(code.name, await call.details() or "")

        task = asyncio.ensure_future(note())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _observed(parse: Callable[[bytes], Any], record: Callable[[Any], None]) -> Callable[[bytes], Any]:
    def parsed(data: bytes) -> Any:
        message = parse(data)
        record(message)
        return message

    return parsed


def _observing(serialize: Callable[[Any], bytes], record: Callable[[Any], None]) -> Callable[[Any], bytes]:
    def serialized(message: Any) -> bytes:
        record(message)
        return serialize(message)

    return serialized


def _identity(metadata: Iterable[tuple[str, str]] | None) -> str:
    """The public half of the identity that the call carries."""
    words = dict(metadata or ()).get("authorization", "").removeprefix("Bearer ")
    return words.partition(".")[0]
