"""A finished or unfinished run, of a simulation or of a server, as a Python program wants it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedmpq.data.data_card import data_facts
from fedmpq.data.dataset import DataError, Dataset
from fedmpq.data.value_range import BOARDS, ValueRange
from fedmpq.export.card import run_facts
from fedmpq.lab.checkpoint import load_checkpoint
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.round_log import client_name, logged_results
from fedmpq.method.history import History
from fedmpq.method.protocol import IntegerMethod
from fedmpq.method.registry import MakesMethod, integer_method
from fedmpq.method.state import ClientRecord, Deployment, GlobalModel
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.grid import MAX_BITS
from fedmpq.server.state_folder import StateFolder

ANYONE = -1
"""The number of a client that no run has: a budget's own."""


NAMED = 20
"""So many clients are named in an error."""


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
    read_history: Callable[[], History]
    method: IntegerMethod | None
    """What deals bits and makes integer models; None where clients train in full precision."""
    test_data: Callable[[], Dataset | None]
    """Reads the run's test images; None if it has none."""
    test_source: str
    data_facts: Callable[[], dict[str, Any]]
    """What cards tell of the run's data."""

    @cached_property
    def history(self) -> History:
        """One row a round: accuracy by budget, bytes and bit-widths."""
        return self.read_history()

    @property
    def budgets(self) -> tuple[float, ...]:
        """The budgets of its clients, each once, in ascending order."""
        return tuple(sorted({client.budget for client in self.model.clients}))

    def deployed(self, budget: float | None = None, *, client: int | str | None = None) -> DeployedModel:
        """The integer model of `budget` bits per weight, or the one that a client runs, by name or number."""
        if (budget is None) == (client is None):
            raise RunError("say which model: deployed(budget=4) or deployed(client=0)")
        record = self.client(client) if client is not None else _anyone(budget)
        (made,) = self.deployments([record])
        return self.model_of(made)

    def deployments(self, clients: Iterable[ClientRecord]) -> list[Deployment]:
        """The integer models that these clients run, each distinct one once."""
        if self.method is None:
            raise RunError(
                f"run {self.name!r} trained in full precision and has no integer model; "
                "its float weights are in run.model.final.weights"
            )
        return self.method.deployments(self.model, clients)

    def model_of(self, deployment: Deployment) -> DeployedModel:
        """One of those, with the facts that an exported file's card tells of it."""
        clients = [record.client for record in deployment.clients if record.client != ANYONE]
        facts = run_facts(self.name, self.model.round, clients, deployment.clients[0].budget)
        facts |= self.data_facts()
        return DeployedModel(self.graph, deployment.layers, deployment.side, self.class_names, facts)

    def client(self, wanted: int | str) -> ClientRecord:
        """A client by its name or number; a name may look like another client's number and comes first."""
        records = self.model.clients
        named = [record for record in records if self.client_names[record.client] == wanted]
        for record in named or [record for record in records if str(record.client) == str(wanted)]:
            return record
        names = list(self.client_names.values())
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        known = ", ".join(names[:NAMED]) + more
        raise RunError(f"run {self.name!r} has no client {wanted}; it has {known}")

    def __repr__(self) -> str:
        clients = len(self.model.clients)
        return f"<Run {self.name!r}: {self.graph.name}, {self.model.round} rounds, {clients} clients>"


def load_run(
    path: str | Path, *, name: str | None = None, blobs: str | None = None, method: MakesMethod | None = None
) -> Run:
    """The run in a simulation's folder, or run `name` in a server's state folder, by default the newest there
    that has a model.

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
        client_names={client.client: client_name(client.client) for client in model.clients},
        # A checkpoint may have been brought here without its log: its models are there all the same.
        read_history=lambda: History(each.facts() for each in logged_results(folder, model.round)),
        method=None if experiment.trains_floats else integer_method(experiment, checkpoint.graph, own),
        test_data=lambda: _test_images(experiment),
        test_source=experiment.data,
        data_facts=lambda: data_facts(experiment.data, _range(experiment)),
    )


def _of_server(state: StateFolder, name: str | None, blobs: str | None) -> Run:
    from fedmpq.server.stored_run import read_history, read_stored_run

    stored = read_stored_run(state, name, blobs)
    return Run(
        folder=state.path,
        name=stored.run.name,
        graph=stored.graph,
        model=stored.model,
        class_names=stored.run.class_names,
        client_names=stored.client_names,
        read_history=lambda: read_history(state, stored.run.run_id)[1],
        method=stored.method,
        test_data=stored.load_test_data,
        test_source=str(stored.config.test_data),
        data_facts=lambda: data_facts(stored.config.test_data, stored.value_range),
    )


def _test_images(experiment: Experiment) -> Dataset:
    from fedmpq.lab.simulation import load_data

    # What all clients agree on takes all training samples to know.
    whole = experiment.data_range == BOARDS
    _, test = load_data(experiment if whole else replace(experiment, train_limit=1))
    return test


def _range(experiment: Experiment) -> ValueRange | None:
    """What codes of measured values stand for; None: there is none, or the data are gone by now."""
    from fedmpq.lab.simulation import value_range_of

    try:
        return value_range_of(experiment)
    except (DataError, ImportError):
        return None


def _anyone(budget: float | None) -> ClientRecord:
    if budget is None or not 1 <= budget <= MAX_BITS:
        raise RunError(f"a budget of {budget} bits per weight is outside 1..{MAX_BITS}")
    return ClientRecord(ANYONE, float(budget), 1)
