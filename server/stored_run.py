"""A run as a state folder holds it, to be read by other programs whether the server runs or not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedmpq.data.dataset import Dataset
from fedmpq.data.value_range import ValueRange
from fedmpq.method.archive import unpack_model
from fedmpq.method.history import History
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.server.blobs import Blobs, open_blobs
from fedmpq.server.own_blobs import place_of_blobs
from fedmpq.server.run_config import RunConfig, load_test_data, make_config
from fedmpq.server.run_history import run_history
from fedmpq.server.run_images import form_of
from fedmpq.server.run_range import stored_range
from fedmpq.server.served_method import served_method
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Run
from fedmpq.server.store.sql import open_store


class StoredRunError(ValueError):
    """No such run, or one that has no model to show yet."""


@dataclass(frozen=True)
class StoredRun:
    """A run with the model that it hands out."""

    run: Run
    config: RunConfig
    method: QuantizedMethod
    model: GlobalModel
    client_names: dict[int, str]
    value_range: ValueRange | None
    """What codes of measured values stand for."""

    @property
    def graph(self) -> Graph:
        return self.method.graph

    def load_test_data(self) -> Dataset | None:
        """The run's test data as its model takes them; None: it has none."""
        form = form_of(self.graph, self.value_range)
        return load_test_data(self.config, form, self.run.class_names)


def read_stored_run(
    state: StateFolder, name: str | None = None, blobs: str | None = None, number: int | None = None
) -> StoredRun:
    """The run of that name or id in the folder; without a name the newest that has a model to show.

    `blobs` says where payloads are, if not where the server had them last. The model is the newest that can
    be handed out, or that of round `number`.
    """
    state.require()
    store = open_store(state.database_url())
    try:
        run = find_run(store, state.path, name)
        place = place_of_blobs(store, blobs, state.blobs)
        return _read(store, open_blobs(place, make=False), run, run.ready if number is None else number)
    finally:
        store.close()


def read_history(state: StateFolder, name: str | None = None) -> tuple[Run, History]:
    """A run as `read_stored_run` finds it, or one that has no model yet, and what it did."""
    state.require()
    store = open_store(state.database_url())
    try:
        run = find_run(store, state.path, name)
        return run, run_history(store, run)
    finally:
        store.close()


def read_graph(state: StateFolder, run: Run) -> Graph:
    """The graph of a run, which it has before it has a model."""
    store = open_store(state.database_url())
    try:
        place = place_of_blobs(store, None, state.blobs)
    finally:
        store.close()
    return Graph.from_bytes(open_blobs(place, make=False).read(run.graph))


def find_run(store: Store, path: Path, name: str | None) -> Run:
    """Of that name or id; without one the newest that has a model to show, or else the newest."""
    runs = store.list_runs()
    if name is not None:
        runs = [run for run in runs if name in (run.name, run.run_id)]
    if not runs:
        raise StoredRunError(f"{path} holds no run{'' if name is None else f' {name!r}'}; see `fedmpq runs`")
    if name is None:
        return next((run for run in runs if run.ready), runs[0])
    return runs[0]


def _read(store: Store, blobs: Blobs, run: Run, number: int) -> StoredRun:
    handed_out = store.round(run.run_id, number) if 1 <= number <= run.ready else None
    if handed_out is None or (number == run.ready and handed_out.model is None):
        raise StoredRunError(_not_ready(run))
    config = make_config(run.config)
    # Without its statistics, or undone because of them, a model is not handed out.
    measured = not config.calibrates or config.calibrates_after(number)
    ready = number == run.ready or (measured and "undone" not in handed_out.metrics)
    if handed_out.model is None or not ready:
        raise StoredRunError(
            f"run {run.name!r} has no model of round {number} to hand out any more, or never had: take round "
            f"{run.ready}, or keep more with keep_models in its settings"
        )
    graph = Graph.from_bytes(blobs.read(run.graph))
    members = store.members(run.run_id)
    names = {client.client_id: client.name for client in store.list_clients(revoked=True)}
    stored = unpack_model(graph, blobs.read(handed_out.model))
    widths = tuple(handed_out.metrics["bit_widths"])
    model = stored.after(number, widths, tuple(m.record for m in members))
    method = served_method(config, graph)
    client_names = {m.client: names[m.client_id] for m in members}
    value_range = stored_range(store, run.run_id, config)
    return StoredRun(run, config, method, model, client_names, value_range)


def _not_ready(run: Run) -> str:
    if run.round < 1:
        return f"run {run.name!r} has not merged a round yet; there is no model to show"
    return (
        f"run {run.name!r} has merged {run.round} rounds, but the statistics of none were measured yet; that "
        f"is done every {run.config.get('evaluate_every', 1)} rounds and at the end: wait for it"
    )
