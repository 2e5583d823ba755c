"""`fedmpq.simulate`: a simulation called from Python, with a network and data that need not have names."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedmpq.data.data_source import DataSource
from fedmpq.data.dataset import Dataset
from fedmpq.data.in_memory import Indexed, from_arrays, from_items, from_pairs
from fedmpq.data.named import TEST_SHARE
from fedmpq.data.samples import Samples
from fedmpq.data.stratified import stratified_split
from fedmpq.data.tasks import for_task
from fedmpq.lab import report, simulation
from fedmpq.lab.checkpoint import FILE_NAME, load_checkpoint
from fedmpq.lab.experiment import Experiment, ExperimentError, make_experiment
from fedmpq.lab.pool import PROCESSES
from fedmpq.lab.progress import watched
from fedmpq.lab.round_log import RoundResult
from fedmpq.lab.run import Run, load_run
from fedmpq.method.registry import MakesMethod

if TYPE_CHECKING:
    from torch import nn

IN_MEMORY = "in memory"

_kept: list[tempfile.TemporaryDirectory[str]] = []
"""Folders of runs that were given none; they live as long as the program."""


def simulate(
    model: str | nn.Module,
    data: str | Path | DataSource | Dataset | Indexed | Iterable[Any] | tuple[Any, Any],
    *,
    budgets: Sequence[float] | None = None,
    rounds: int | None = None,
    method: str | MakesMethod = "fedmpq",
    folder: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    on: str = PROCESSES,
    boards: str | Path | Mapping[str, Any] | None = None,
    progress: bool = True,
    **settings: Any,
) -> Run:
    """Train one model over simulated clients, one for each of `budgets`, and give the run.

    `model` is a `torch.nn.Module`, a name of the zoo or "package.module:function". `data` is a name or path
    as `fedmpq simulate --data` takes it, a `DataSource`, a `Dataset`, a torch data set of (sample, label)
    pairs, arrays `(samples, labels)`, or a pair of two of these: training and test. Without test images a
    tenth is kept for it. `method` is a name, or a class of your own (see `fedmpq.QuantizedMethod`). `folder`
    keeps the run; without one it is gone when the program ends. Clients train in `workers` processes, by
    default one a core; with `on="ray"` on Ray, with `on="ray://HOST:PORT"` on that cluster. `boards` says how
    fast clients would be, for a virtual clock: a TOML file, or its tables such as `{"spread": 10}`. Other
    settings are those of `fedmpq simulate`, such as `epochs=2`.
    """
    experiment = make_experiment(_named(model, data, budgets, rounds, method, {**settings, "boards": boards}))
    train, test = _loaded(data, experiment)
    place = _place(folder, resume, overwrite)
    own = None if isinstance(method, str) else method
    prepared = simulation.prepare_with(
        experiment, train, test, None if isinstance(model, str) else model, own
    )
    if resume and (place / FILE_NAME).exists():
        prepared = _resumed(prepared, place)
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, quiet=not progress)

    def tell(result: RoundResult) -> None:
        console.print(report.round_line(result, experiment.rounds), soft_wrap=True)

    with watched(console, tell) as listener:
        simulation.run(prepared, place, workers, listener, on)
    return load_run(place, method=own)


def _named(
    model: str | nn.Module,
    data: object,
    budgets: Sequence[float] | None,
    rounds: int | None,
    method: str | MakesMethod,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The settings of the experiment; what is an object goes by the name of its class."""
    given = dict(settings)
    given["model"] = model if isinstance(model, str) else type(model).__name__
    given["data"] = str(data) if isinstance(data, str | Path) else IN_MEMORY
    given["method"] = method if isinstance(method, str) else _spec(method)
    if budgets is not None:
        given["budgets"] = tuple(float(budget) for budget in budgets)
    if rounds is not None:
        given["rounds"] = rounds
    return given


def _spec(method: MakesMethod) -> str:
    name = getattr(method, "__qualname__", type(method).__qualname__)
    return f"{getattr(method, '__module__', '__main__')}:{name}"


def _loaded(data: object, experiment: Experiment) -> tuple[Dataset, Dataset]:
    if isinstance(data, str | Path):
        return simulation.load_data(experiment)
    if isinstance(data, DataSource):
        return simulation.load_data(experiment, data)
    if isinstance(data, tuple) and len(data) == 2 and (isinstance(data[1], tuple) or not _is_images(data[0])):
        train, test = (for_task(_samples(part), experiment.task) for part in data)
        names = train.class_names
        if experiment.task == "reconstruction":
            # What is trained on may be without labels, all of it normal.
            names = max(names, test.class_names, key=len)
        return simulation.coded_data(
            experiment, replace(train, class_names=names), replace(test, class_names=names)
        )
    pair = stratified_split(for_task(_samples(data), experiment.task), TEST_SHARE, experiment.seed)
    return simulation.coded_data(experiment, *pair)


def _is_images(value: object) -> bool:
    return getattr(value, "ndim", 0) in (2, 3, 4) and hasattr(value, "dtype")


def _samples(data: object) -> Samples:
    if isinstance(data, Dataset):
        return Samples(IN_MEMORY, data.images, data.labels, data.class_names, data.skipped, data.targets)
    if isinstance(data, tuple) and len(data) == 2:
        return from_arrays(data[0], data[1])
    if _is_images(data):
        return from_arrays(data)  # type: ignore[arg-type]
    if isinstance(data, Indexed):
        return from_pairs(data)
    if isinstance(data, Iterable):
        return from_items(data)
    raise ExperimentError(
        f"data is a {type(data).__name__}; give a path, a Dataset, arrays (samples, labels), or an object "
        "that gives (sample, label) by index or one after the other"
    )


def _place(folder: str | Path | None, resume: bool, overwrite: bool) -> Path:
    if folder is None:
        if resume:
            raise ExperimentError("resume=True needs the folder of the run to go on with")
        _kept.append(tempfile.TemporaryDirectory(prefix="fedmpq-run-"))
        return Path(_kept[-1].name)
    place = Path(folder).expanduser()
    if (place / FILE_NAME).exists() and not (resume or overwrite):
        raise ExperimentError(
            f"{place} already holds a run; pass resume=True to go on with it, overwrite=True to replace it, "
            "or another folder"
        )
    return place


def _resumed(prepared: simulation.Prepared, place: Path) -> simulation.Prepared:
    checkpoint = load_checkpoint(place)
    stored = replace(checkpoint.experiment, rounds=prepared.experiment.rounds)
    if stored != prepared.experiment or checkpoint.graph != prepared.start.graph:
        raise ExperimentError(f"{place} holds a run with other settings; only rounds may change")
    return replace(prepared, start=replace(checkpoint, experiment=prepared.experiment))
