"""The Ray cluster that a simulation runs on: one of its own on this machine, a given one, or the program's.

A cluster that starts here listens on the loopback interface alone, takes a token that nobody else has,
reports no usage, has no dashboard, and keeps its files in a folder that goes with it.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from fedmpq.lab.pool import RAY, WorkerError
from fedmpq.system.machine import available_cores

_LOOPBACK = {"127.0.0.1", "::1"}
_LOOPBACK_ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Off, a node has the loopback address and all its servers listen there; Ray reads it when it is imported."""

JOINS = 3
"""Attempts to join a cluster whose head fails to start what is to serve this program. That is a process of
its own for every client, and on a busy machine one was seen never to begin."""
_NOT_SERVED = "Initialization failure from server"


class Cluster:
    """Ray, connected to a cluster until `close`."""

    def __init__(self, on: str) -> None:
        self._opened = ExitStack()
        if on != RAY:
            self._opened.enter_context(_joined(on))
        elif not _program_has_one():
            self._opened.enter_context(_started())
        self.ray: Any = _ray()

    @property
    def cores(self) -> int:
        """Of all its nodes together, as they are offered to tasks."""
        return max(1, int(self.ray.cluster_resources().get("CPU", 1)))

    def close(self) -> None:
        """End a cluster that was started here, and leave one that was not."""
        self._opened.close()


def _program_has_one() -> bool:
    """Whether the program that runs the simulation is connected to a cluster already."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _ray() -> Any:
    try:
        import ray
    except ModuleNotFoundError as error:
        raise WorkerError(
            f'simulating on Ray needs {error.name!r}, which is not installed; pip install "fedmpq[ray]"'
        ) from None
    return ray


@contextmanager
def _started() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_environment())
        ray = _ray()
        # What the node is going to listen at.
        if (address := ray.util.get_node_ip_address()) not in _LOOPBACK:
            raise WorkerError(
                f"a Ray cluster of this program would listen at {address}, where others can reach it: ray "
                f"was imported before: set {_LOOPBACK_ALONE}=0 before that, or call ray.init() yourself"
            )
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="fedmpq-", ignore_cleanup_errors=True)
        )
        stack.callback(ray.shutdown)
        ray.init(
            address="local",
            num_cpus=available_cores(),
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            _temp_dir=folder,
        )
        yield


@contextmanager
def _environment() -> Iterator[None]:
    """What Ray and its processes read from the environment, as it was again afterwards."""
    changes = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _token(),
        _LOOPBACK_ALONE: "0",
        # Ray would tell of every lost worker on standard output; whoever waits for its task does that.
        "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    }
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _token() -> str:
    """One for all clusters of this process: Ray reads it once."""
    return secrets.token_hex(32)


def _connected(ray: Any, address: str) -> Any:
    for left in reversed(range(JOINS)):
        try:
            return ray.init(address, log_to_driver=False, configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            said = " ".join(str(error).split())[:500]
            if left and _NOT_SERVED in said:
                continue
            raise WorkerError(f"there is no Ray cluster at {address} that can be joined: {said}") from None
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _joined(address: str) -> Iterator[None]:
    connection = _connected(_ray(), address)
    try:
        yield
    finally:
        connection.disconnect()
