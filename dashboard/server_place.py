"""A server's folder: what its store remembers, and what the server says where one runs in it."""

from __future__ import annotations

import shutil
import threading
from contextlib import ExitStack
from pathlib import Path

from fedmpq.dashboard.model_files import checked_file, models_in
from fedmpq.dashboard.places import Facts, NotThere, graph_facts, moment_text, rounds_facts
from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.administration_client import Administration, NotRunning, administration
from fedmpq.server.exports import round_of
from fedmpq.server.run_history import run_history
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.status_report import status_facts
from fedmpq.server.store.errors import UnknownRun
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Run
from fedmpq.server.store.sql import open_store
from fedmpq.server.stored_run import read_graph
from fedmpq.server.stored_status import stored_status

LOOK_SECONDS = 10.0
"""A server that has not answered by then is too busy; the page says so."""


class ServerPlace:
    """`starting`: the server is about to start in this process; the store is not touched before it answers,
    because it may be made, or brought to this version, just now."""

    def __init__(self, key: str, state: StateFolder, *, starting: bool = False) -> None:
        self.key = key
        self.state = state
        self._starting = starting
        self._store: Store | None = None
        self._opening = threading.Lock()
        self._graphs: dict[str, Facts] = {}
        self._channel = ExitStack()
        self._server: Administration | None = None

    def look(self) -> Facts:
        status, note = self._status()
        place: Facts = {
            "key": self.key,
            "kind": "server",
            "path": str(self.state.path),
            "running": status is not None,
            "note": note,
            "disk": self._disk(),
            "runs": [],
            "boards": [],
        }
        if self._starting:
            return place
        known = status_facts(status or stored_status(self.store), running=status is not None)
        live = known["run"]
        runs = [_run_facts(run) for run in self.store.list_runs()]
        for run in runs:
            run["exports"] = len(self._exports(run["run_id"]))
            if live is not None and run["run_id"] == live["run_id"]:
                run |= {"live": live, "state": live["state"], "reason": live["reason"]}
        for board in known["clients"]:
            if board["connected"]:
                # It would be another one at every look.
                board["last_seen"] = None
        return place | {"runs": runs, "boards": known["clients"], "version": known["server_version"]}

    def _status(self) -> tuple[pb.ServerStatus | None, str]:
        """What the server says, or None and why."""
        try:
            status = self._asked()
        except NotRunning as reason:
            return None, "the server is starting" if self._starting else str(reason)
        self._starting = False
        return status, ""

    def _asked(self) -> pb.ServerStatus:
        """Over a channel that stays open: a new one takes longer than the answer. It ends with an error."""
        try:
            if self._server is None:
                self._server = self._channel.enter_context(administration(self.state))
            return self._server.GetStatus(pb.GetStatusRequest(), timeout=LOOK_SECONDS)
        except Exception as error:
            self._server = None
            # It closes the channel, and raises in our words what gRPC has raised.
            self._channel.__exit__(type(error), error, error.__traceback__)
            raise

    def _disk(self) -> Facts | None:
        try:
            usage = shutil.disk_usage(self.state.path)
        except OSError:
            return None
        # In steps of a thousandth: it is never quite the same twice.
        step = max(1, usage.total // 1000)
        return {"free": usage.free // step * step, "total": usage.total}

    @property
    def store(self) -> Store:
        """Opened when it is first asked for, because it may not be there yet when the dashboard starts."""
        with self._opening:
            if self._store is None:
                self.state.require()
                self._store = open_store(self.state.database_url())
            return self._store

    def close(self) -> None:
        with self._opening:
            if self._store is not None:
                self._store.close()
            self._store = None
        self._channel.close()

    def told(self, run_id: str, after: int) -> Facts:
        run = self._run(run_id)
        history = run_history(self.store, run, after + 1)
        names = {client.client_id: client.name for client in self.store.list_clients(revoked=True)}
        of_client = {member.client: names[member.client_id] for member in self.store.members(run_id)}
        folders = sorted(self._exports(run_id), key=lambda folder: round_of(folder.name), reverse=True)
        return {
            "round": run.round,
            "rounds": rounds_facts(history.rounds),
            "models": [model for folder in folders for model in models_in(folder, folder.name, of_client)],
            **self._graph(run),
        }

    def _graph(self, run: Run) -> Facts:
        if run.run_id not in self._graphs:
            self._graphs[run.run_id] = graph_facts(read_graph(self.state, run))
        return self._graphs[run.run_id]

    def _exports(self, run_id: str) -> list[Path]:
        return list((self.state.path / "exports").glob(f"{run_id}-*-*"))

    def _run(self, run_id: str) -> Run:
        try:
            return self.store.run(run_id)
        except UnknownRun as error:
            raise NotThere(str(error)) from None

    def model_file(self, run_id: str, folder: str, name: str) -> Path:
        self._run(run_id)
        for exported in self._exports(run_id):
            if exported.name == folder:
                return checked_file(exported, name)
        raise NotThere("these models are gone; newer ones have taken their place")


def _run_facts(run: Run) -> Facts:
    return {
        "run_id": run.run_id,
        "name": run.name,
        "state": run.state,
        "reason": run.reason,
        "round": run.round,
        "rounds": run.config["rounds"],
        "created": moment_text(run.created),
        "ended": None if run.ended is None else moment_text(run.ended),
        "live": None,
    }
