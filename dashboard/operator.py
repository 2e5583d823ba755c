"""What the buttons do: the same as `fedmpq runs` and `fedmpq server bundle|revoke`, by the same code."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from fedmpq.dashboard.places import DashboardError, Facts
from fedmpq.dashboard.server_place import ServerPlace
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.access import BundleRequest, make_bundles, revoke_clients
from fedmpq.server.administration_client import CALL_SECONDS, START_SECONDS, administration
from fedmpq.server.status_report import run_line
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.dashboard")
MOST_CONFIG = 100_000
"""Characters of a run.toml."""


class Operator:
    """Of the server in one folder; every deed is a line of the server's log."""

    def __init__(self, place: ServerPlace) -> None:
        self._place = place
        self._deeds = {
            "pause": self._pause,
            "resume": self._resume,
            "abort": self._abort,
            "start": self._start,
            "drop": self._drop,
            "bundle": self._bundle,
        }

    def do(self, deed: str, request: Facts, address: str) -> str:
        """What was done, in a sentence. Raises an error of fedmpq's own where it is refused."""
        if deed not in self._deeds:
            raise DashboardError(f"there is no button {deed!r}; there are {', '.join(self._deeds)}")
        what = {name: value for name, value in request.items() if name in ("run_id", "name")}
        say(log, f"the operator asks: {deed}", by="dashboard", address=address, **what)
        return self._deeds[deed](request)

    def _pause(self, request: Facts) -> str:
        return self._change("PauseRun", request)

    def _resume(self, request: Facts) -> str:
        return self._change("ResumeRun", request)

    def _abort(self, request: Facts) -> str:
        return self._change("AbortRun", request)

    def _change(self, call: str, request: Facts) -> str:
        message = pb.RunRequest(run_id=_text(request, "run_id"))
        with administration(self._place.state) as server:
            return run_line(getattr(server, call)(message, timeout=CALL_SECONDS))

    def _start(self, request: Facts) -> str:
        """Relative paths in the config start from the folder that the server was started in."""
        message = pb.StartRunRequest(config=_text(request, "config", MOST_CONFIG), folder=str(Path.cwd()))
        with administration(self._place.state) as server:
            return f"queued: {run_line(server.StartRun(message, timeout=START_SECONDS))}"

    def _drop(self, request: Facts) -> str:
        (revoked,) = revoke_clients(self._place.state, self._place.store, [_text(request, "name")])
        return f"{revoked.name} is dropped: its identity has ended, and its name is free for a new bundle"

    def _bundle(self, request: Facts) -> str:
        """Its key stays on the server's disk: it does not cross the browser."""
        names = [_text(request, "name")]
        (folder,) = make_bundles(self._place.state, self._place.store, names, BundleRequest())
        return f"the bundle is {folder} on the server; copy it to the board and delete it there"


def _text(request: Facts, name: str, most: int = 200) -> str:
    value: Any = request.get(name)
    if not isinstance(value, str) or not 0 < len(value.strip()) <= most:
        raise DashboardError(f"{name} must be a text of 1 to {most} characters")
    return value.strip()
