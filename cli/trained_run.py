"""A run that has a model to show: a simulation's checkpoint, or one in a server's state folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedmpq.data.dataset import Dataset
from fedmpq.lab.checkpoint import Checkpoint, load_checkpoint
from fedmpq.method.protocol import IntegerMethod
from fedmpq.method.registry import MethodError, integer_method
from fedmpq.method.state import GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.server.state_folder import StateFolder


class TrainedRunError(ValueError):
    """A run that cannot be used as asked."""


@dataclass(frozen=True)
class TrainedRun:
    """What both kinds of run have in common."""

    name: str
    method: IntegerMethod
    model: GlobalModel
    class_names: tuple[str, ...]
    client_names: dict[int, str]
    """What people call each client; files are named by it."""
    test_data: Callable[[], Dataset | None]
    """The run's test images, None if it has none."""
    test_source: str

    @property
    def graph(self) -> Graph:
        return self.method.graph


def read_run(path: Path, name: str | None = None, blobs: str | None = None) -> TrainedRun:
    """A run's folder or checkpoint file, or a server's state folder, whose run `name` (or newest) it is."""
    if path.is_dir() and StateFolder(path).exists:
        return _of_server(StateFolder(path), name, blobs)
    if name is not None or blobs is not None:
        raise TrainedRunError(f"{path} is no server's folder; --run-name and --blobs go with one")
    return _of_simulation(path)


def quantized_method(checkpoint: Checkpoint) -> IntegerMethod:
    """What deals and deploys a simulation's integer models."""
    try:
        return integer_method(checkpoint.experiment, checkpoint.graph)
    except MethodError as error:
        raise TrainedRunError(f"the run has no integer model to export: {error}") from None


def _of_server(state: StateFolder, name: str | None, blobs: str | None) -> TrainedRun:
    from fedmpq.server.run_config import load_test_data
    from fedmpq.server.stored_run import read_stored_run

    stored = read_stored_run(state, name, blobs)
    return TrainedRun(
        name=stored.run.name,
        method=stored.method,
        model=stored.model,
        class_names=stored.run.class_names,
        client_names=stored.client_names,
        test_data=lambda: load_test_data(stored.config),
        test_source=str(stored.config.test_data),
    )


def _of_simulation(path: Path) -> TrainedRun:
    from fedmpq.data.named import load_named

    checkpoint = load_checkpoint(path)
    experiment = checkpoint.experiment
    return TrainedRun(
        name=path.resolve().name if path.is_dir() else path.resolve().parent.name,
        method=quantized_method(checkpoint),
        model=checkpoint.model,
        class_names=checkpoint.class_names,
        client_names={client.client: f"client-{client.client}" for client in checkpoint.model.clients},
        test_data=lambda: load_named(
            experiment.data, train_limit=1, test_limit=experiment.test_limit, size=experiment.size
        )[1],
        test_source=experiment.data,
    )
