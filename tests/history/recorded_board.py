"""`python -m tests.history.recorded_board HISTORY.jsonl WORDS...`: `fedmpq WORDS...` that writes down what
its server tells it. The program is the real one; only the channel under its stub is watched."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grpc.aio

from fedmpq.cli.main import main
from fedmpq.proto.fedmpq.v1 import federation_pb2_grpc
from tests.history.recording import Recorder, RecordingChannel


def watch(recorder: Recorder) -> None:
    """From now on every stub of this process is built on a watched channel."""
    make_stub: Any = federation_pb2_grpc.FederationStub

    def watched(channel: grpc.aio.Channel) -> Any:
        return make_stub(RecordingChannel(channel, recorder))

    federation_pb2_grpc.FederationStub = watched  # type: ignore[assignment, misc]


if __name__ == "__main__":
    watch(Recorder(Path(sys.argv[1])))
    raise SystemExit(main(sys.argv[2:]))
