"""The operator's end of the Administration service: a channel to the running server over its Unix socket."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, cast

import grpc

from fedmpq.proto import administration_pb2 as pb
from fedmpq.proto.fedmpq.v1 import administration_pb2_grpc
from fedmpq.server.state_folder import StateFolder

CALL_SECONDS = 60.0
START_SECONDS = 600.0
"""A new run's model is traced before the answer comes, which takes a while on a small machine."""
_REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
)


class NotRunning(RuntimeError):
    """No server answers at the folder's socket."""


class Refused(ValueError):
    """The server's answer to a request it does not carry out."""


class AdministrationError(RuntimeError):
    """The server could not answer."""


class Administration(Protocol):
    """The methods of the generated stub, which has no types."""

    GetStatus: grpc.UnaryUnaryMultiCallable[pb.GetStatusRequest, pb.ServerStatus]
    WatchStatus: grpc.UnaryStreamMultiCallable[pb.GetStatusRequest, pb.ServerStatus]
    StartRun: grpc.UnaryUnaryMultiCallable[pb.StartRunRequest, pb.RunStatus]
    ListRuns: grpc.UnaryUnaryMultiCallable[pb.ListRunsRequest, pb.ListRunsResponse]
    PauseRun: grpc.UnaryUnaryMultiCallable[pb.RunRequest, pb.RunStatus]
    ResumeRun: grpc.UnaryUnaryMultiCallable[pb.RunRequest, pb.RunStatus]
    AbortRun: grpc.UnaryUnaryMultiCallable[pb.RunRequest, pb.RunStatus]
    SetRun: grpc.UnaryUnaryMultiCallable[pb.SetRunRequest, pb.RunStatus]
    StartRollout: grpc.UnaryUnaryMultiCallable[pb.StartRolloutRequest, pb.ReleaseStatus]
    GetRollouts: grpc.UnaryUnaryMultiCallable[pb.GetRolloutsRequest, pb.RolloutsStatus]
    RollBack: grpc.UnaryUnaryMultiCallable[pb.RunRequest, pb.ReleaseStatus]
    PinBoard: grpc.UnaryUnaryMultiCallable[pb.PinBoardRequest, pb.RolloutsStatus]


@contextmanager
def administration(state: StateFolder) -> Iterator[Administration]:
    """The server that runs in `state`; what goes wrong inside is one of the errors above."""
    if not state.admin_socket.exists():
        raise NotRunning(_not_running(state))
    if not os.access(state.admin_socket, os.R_OK | os.W_OK):
        raise AdministrationError(f"{state.admin_socket} belongs to another user; become the server's user")
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
    with grpc.insecure_channel(state.admin_target(), options) as channel:
        stub = cast("Callable[[grpc.Channel], Administration]", administration_pb2_grpc.AdministrationStub)
        try:
            yield stub(channel)
        except grpc.RpcError as error:
            raise _explained(error, state) from None


def _explained(error: grpc.RpcError, state: StateFolder) -> Exception:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        # The socket of a server that was killed is still there.
        return NotRunning(_not_running(state))
    if code in _REFUSED:
        return Refused(details)
    return AdministrationError(f"the server failed to answer ({code.name}): {details}")


def _not_running(state: StateFolder) -> str:
    if not state.exists:
        return f"{state.path} is no server's folder; name it with --state"
    return f"no server runs in {state.path}; start it: fedmpq server run.toml --state {state.path}"
