"""A finished or unfinished run, of a simulation or of a server, as a Python program wants it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedmpq.lab.checkpoint import load_checkpoint
from fedmpq.lab.history import History
from fedmpq.lab.round_log import logged_results
from fedmpq.method.protocol import IntegerMethod
from fedmpq.method.registry import MakesMethod, integer_method
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.grid import MAX_BITS
from fedmpq.server.state_folder import StateFolder

ANYONE = -1
"""The number of a client that no run has: a budget's own."""


class RunError(ValueError):
    """A run that cannot be read, or asked for what it does not have."""


@dataclass(frozen=True)
class Run:
    """What a run has come to so far."""

    folder: Path
    name: str
    graph: Graph
    model: GlobalModel
    """The global model after `model.round` rounds."""
    class_names: tuple[str, ...]
    client_names: dict[int, str]
    history: History
    """One row a round: accuracy by budget, bytes and bit-widths."""
    method: IntegerMethod | None
    """What deals bits and makes integer models; None where clients train in full precision."""

    @property
    def budgets(self) -> tuple[float, ...]:
        """The budgets of its clients, each once, in ascending order."""
        return tuple(sorted({client.budget for client in self.model.clients}))

    def deployed(self, budget: float | None = None, *, client: int | str | None = None) -> DeployedModel:
        """The integer model of `budget` bits per weight, or the one that a client runs, by name or number."""
        if (budget is None) == (client is None):
            raise RunError("say which model: deployed(budget=4) or deployed(client=0)")
        if self.method is None:
            raise RunError(
                f"run {self.name!r} trained in full precision and has no integer model; "
                "its float weights are in run.model.final.weights"
            )
        record = self._client(client) if budget is None else _anyone(budget)
        (made,) = self.method.deployments(self.model, [record])
        facts = {"run": self.name, "round": self.model.round, "budget": record.budget}
        return DeployedModel(self.graph, made.layers, made.side, self.class_names, facts)

    def _client(self, wanted: int | str | None) -> ClientRecord:
        for record in self.model.clients:
            if wanted in (record.client, self.client_names[record.client]):
                return record
        known = ", ".join(self.client_names.values())
        raise RunError(f"run {self.name!r} has no client {wanted!r}; it has {known}")

    def __repr__(self) -> str:
        clients = len(self.model.clients)
        return f"<Run {self.name!r}: {self.graph.name}, {self.model.round} rounds, {clients} clients>"


def load_run(
    path: str | Path, *, name: str | None = None, blobs: str | None = None, method: MakesMethod | None = None
) -> Run:
    """The run in a simulation's folder, or run `name` (by default the newest) in a server's state folder.

    `blobs` is where that server keeps payloads, if elsewhere; `method` the class of a run whose method has no
    name to load it by.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and StateFolder(folder).exists:
        return _of_server(StateFolder(folder), name, blobs)
    if name is not None or blobs is not None:
        raise RunError(f"{folder} is no server's folder; name and blobs go with one")
    return _of_simulation(folder, method)


def _of_simulation(path: Path, own: MakesMethod | None) -> Run:
    checkpoint = load_checkpoint(path)
    folder = path if path.is_dir() else path.parent
    experiment, model = checkpoint.experiment, checkpoint.model
    return Run(
        folder=folder,
        name=folder.resolve().name,
        graph=checkpoint.graph,
        model=model,
        class_names=checkpoint.class_names,
        client_names={client.client: f"client-{client.client}" for client in model.clients},
        history=History.of_results(logged_results(folder, model.round)),
        method=None if experiment.trains_floats else integer_method(experiment, checkpoint.graph, own),
    )


def _of_server(state: StateFolder, name: str | None, blobs: str | None) -> Run:
    from fedmpq.server.stored_run import read_stored_run

    stored = read_stored_run(state, name, blobs)
    return Run(
        folder=state.path,
        name=stored.run.name,
        graph=stored.graph,
        model=stored.model,
        class_names=stored.run.class_names,
        client_names=stored.client_names,
        history=History(stored.history),
        method=stored.method,
    )


def _anyone(budget: float) -> ClientRecord:
    if not 1 <= budget <= MAX_BITS:
        raise RunError(f"a budget of {budget:g} bits per weight is outside 1..{MAX_BITS}")
    return ClientRecord(ANYONE, float(budget), 1)
