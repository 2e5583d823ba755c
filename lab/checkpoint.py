"""Checkpoints: one file that holds all a run needs to go on, replaced as a whole after every round.

An `.npz` archive: `graph` (the graph's bytes), `meta` (JSON), and tensors as method.archive has them.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmpq.lab.experiment import Experiment, make_experiment
from fedmpq.lab.flights import flights_arrays, flights_meta, stored_flights, stored_records
from fedmpq.lab.gathered import Flights
from fedmpq.method.archive import Tensors
from fedmpq.method.state import GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.system.durable_files import replacing

FORMAT = 1
FILE_NAME = "checkpoint.npz"


class CheckpointError(ValueError):
    """A file that is no checkpoint, or one of another version."""


@dataclass(frozen=True)
class Checkpoint:
    experiment: Experiment
    graph: Graph
    model: GlobalModel
    class_names: tuple[str, ...]
    flights: Flights | None = None
    """What is on its way in an asynchronous run."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Takes the place of the old one: a crash leaves the old or the new, never half of one."""
    model = checkpoint.model
    meta = {
        "format": FORMAT,
        "experiment": checkpoint.experiment.to_dict(),
        "class_names": checkpoint.class_names,
        "round": model.round,
        "bit_widths": model.bit_widths,
        "clients": [asdict(client) for client in model.clients],
        **flights_meta(checkpoint.flights),
    }
    target = folder / FILE_NAME
    with replacing(target, private=False) as file:
        np.savez(
            file,
            graph=_as_array(checkpoint.graph.to_bytes()),
            meta=_as_array(json.dumps(meta).encode()),
            **Tensors.of(model).to_arrays(),
            **flights_arrays(checkpoint.flights),
        )
    return target


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint file, or the one in a run's folder."""
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}; name a run's folder or its {FILE_NAME}")
    if not zipfile.is_zipfile(path):
        raise CheckpointError(f"{path} is not a checkpoint, or it is damaged: it is no .npz archive")
    try:
        # Opened here, because NumPy leaves a file open that turns out to be no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        meta = json.loads(bytes(arrays["meta"]))
        if meta["format"] != FORMAT:
            raise CheckpointError(f"its format is {meta['format']}, and this version reads format {FORMAT}")
        checkpoint = _from_arrays(meta, arrays)
        _check(checkpoint)
    # A damaged archive makes zipfile and NumPy raise nearly anything, and so do settings of another version.
    except Exception as error:
        reason = f"{type(error).__name__} {error}" if isinstance(error, LookupError) else str(error)
        raise CheckpointError(f"{path} cannot be used as a checkpoint: {reason}") from error
    return checkpoint


def _from_arrays(meta: dict[str, Any], arrays: dict[str, Any]) -> Checkpoint:
    clients = stored_records(meta["clients"])
    graph = Graph.from_bytes(bytes(arrays["graph"]))
    tensors = Tensors.from_arrays(graph, arrays)
    model = tensors.after(meta["round"], tuple(meta["bit_widths"]), clients)
    experiment = make_experiment(meta["experiment"])
    flights = stored_flights(graph, meta, arrays)
    return Checkpoint(experiment, graph, model, tuple(meta["class_names"]), flights)


def _check(checkpoint: Checkpoint) -> None:
    """The clients are of the experiment, and their bit-widths of the graph."""
    graph, model = checkpoint.graph, checkpoint.model
    experiment, first = checkpoint.experiment, range(len(checkpoint.experiment.budgets))
    numbers = [client.client for client in model.clients]
    if (
        numbers[: len(first)] != list(first)
        or (experiment.population is None and len(numbers) != len(first))
        or any(client.budget != experiment.budget_of(client.client) for client in model.clients)
    ):
        raise CheckpointError("its clients are not those of its experiment")
    for widths in (
        model.bit_widths,
        *(w for c in model.clients for w in (c.dealt, c.returned) if w is not None),
    ):
        if len(widths) != len(graph.layers):
            raise CheckpointError(f"{len(widths)} bit-widths for {len(graph.layers)} layers")


def _as_array(data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.uint8)
