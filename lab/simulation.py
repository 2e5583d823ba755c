"""The simulator: rounds of a federated method, clients in parallel processes, a checkpoint after every round.

Everything random is drawn by counter from the seed, and updates are merged in the order of their clients, so
one seed gives one result to the bit whatever the number of workers, and a resumed run ends where an unbroken
one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from fedmpq.data.data_source import DataSource
from fedmpq.data.dataset import Dataset, resized
from fedmpq.data.named import load_measured
from fedmpq.data.samples import Samples
from fedmpq.data.tasks import trained_on
from fedmpq.data.value_range import BOARDS, ValueRange, agreed_range, parse_range
from fedmpq.exchange.messages import Assignment, Update
from fedmpq.lab.asynchronous import Asynchronous
from fedmpq.lab.boards import micros, seconds
from fedmpq.lab.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from fedmpq.lab.experiment import Experiment, ExperimentError
from fedmpq.lab.first_model import make_graph, seeded_module
from fedmpq.lab.fleet import evaluated, first_clients, parts_of
from fedmpq.lab.gathered import Flights, Source
from fedmpq.lab.pool import PROCESSES, Parts, Pool, Returned, Sent, require_place
from fedmpq.lab.probes import Probe, probes_of
from fedmpq.lab.ray_pool import RayPool
from fedmpq.lab.round_log import Accuracies, RoundResult, append_result, logged_results, write_log
from fedmpq.lab.round_parts import counted_bytes
from fedmpq.lab.synchronous import Synchronous
from fedmpq.lab.workers import WorkerPool
from fedmpq.method.protocol import Method
from fedmpq.method.registry import MakesMethod, buffering_method, float_method, integer_method
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.metrics import METRICS
from fedmpq.model.module_state import initial_state
from fedmpq.model.task import outputs_of
from fedmpq.server.earlier_run import earlier_weights
from fedmpq.system.folder_locks import FolderTaken, locked_folder
from fedmpq.system.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Progress:
    """Heard by whoever watches: how far a round is, and its result when it is over."""

    round: int
    rounds: int
    done: int
    selected: int
    result: RoundResult | None = None


Listener = Callable[[Progress], None]


@dataclass(frozen=True)
class Prepared:
    """An experiment with its data loaded, its clients' shares dealt and its model traced."""

    experiment: Experiment
    train: Dataset
    test: Dataset
    parts: Parts
    start: Checkpoint
    module: nn.Module | None = None
    """The network itself where it was given and not named; clients that train in full precision need it."""
    own_method: MakesMethod | None = None
    """A class in place of the one that the experiment names."""


def prepare(experiment: Experiment) -> Prepared:
    """Load and divide the data, trace the model, make the clients."""
    return prepare_with(experiment, *load_data(experiment))


def prepare_with(
    experiment: Experiment,
    train: Dataset,
    test: Dataset,
    module: nn.Module | None = None,
    own_method: MakesMethod | None = None,
) -> Prepared:
    """The same with data that is loaded already, and perhaps a module or a method that has no name."""
    parts = parts_of(experiment, train.labels)
    outputs = outputs_of(experiment.task, len(train.class_names), train.image_shape)
    network = module or seeded_module(experiment, outputs, train.image_shape[2])
    graph = make_graph(experiment, train, network)
    clients = first_clients(experiment, parts)
    weights, side = initial_state(network, graph, experiment.clips_begin)
    if experiment.weights is not None:
        weights, side = earlier_weights(experiment.weights).start(graph, weights, side)
    if experiment.trains_floats:
        model = float_method(experiment, graph).start(weights, side, clients)
    else:
        model = integer_method(experiment, graph, own_method).start(weights, side, clients)
    start = Checkpoint(experiment, graph, model, train.class_names)
    return Prepared(experiment, train, test, parts, start, module, own_method)


def reopen(folder: Path, rounds: int | None = None) -> Prepared:
    """A run as its last checkpoint left it, perhaps to go on for more rounds than first asked for."""
    checkpoint = load_checkpoint(folder)
    if rounds is not None:
        if rounds < checkpoint.model.round:
            raise ExperimentError(
                f"{folder} has done {checkpoint.model.round} rounds; rounds = {rounds} is fewer"
            )
        checkpoint = replace(checkpoint, experiment=replace(checkpoint.experiment, rounds=rounds))
    train, test = load_data(checkpoint.experiment)
    parts, image = parts_of(checkpoint.experiment, train.labels), checkpoint.graph.input
    if (
        train.image_shape != (image.height, image.width, image.channels)
        or train.class_names != checkpoint.class_names
        or any(len(parts[client.client]) != client.samples for client in checkpoint.model.clients)
    ):
        raise ExperimentError(
            f"the data at {checkpoint.experiment.data} is not what {folder} was started with"
        )
    return Prepared(checkpoint.experiment, train, test, parts, checkpoint)


def run(
    prepared: Prepared, folder: Path, workers: int | None, listener: Listener, on: str = PROCESSES
) -> list[RoundResult]:
    """All rounds that are left; results go to the folder's log, one JSON object a line.

    Clients train in so many workers, by default one a core: processes of this machine, or actors of Ray. The
    folder is this process's alone meanwhile: two would write their lines into one log.
    """
    require_place(on)
    experiment, graph = prepared.experiment, prepared.start.graph
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with locked_folder(folder):
            if experiment.trains_floats:
                return _run(float_method(experiment, graph), prepared, folder, workers, listener, on)
            method = integer_method(experiment, graph, prepared.own_method)
            return _run(method, prepared, folder, workers, listener, on)
    except FolderTaken:
        raise ExperimentError(
            f"another simulation works in {folder}; wait until it has ended, or choose another --out"
        ) from None


def _run(
    method: Method[Sent, Returned],
    prepared: Prepared,
    folder: Path,
    workers: int | None,
    listener: Listener,
    on: str,
) -> list[RoundResult]:
    experiment, checkpoint = prepared.experiment, prepared.start
    results = logged_results(folder, checkpoint.model.round)
    save_checkpoint(folder, checkpoint)
    write_log(folder, experiment, results)
    pool: Pool[Sent, Returned] = _opened(prepared, workers, on)
    with closing(pool):
        model = checkpoint.model
        began = micros(results[-1].virtual_time or 0.0) if results else 0
        source = _source(method, prepared, pool, began)
        while model.round < experiment.rounds:
            model, result = _round(method, model, prepared, pool, source, listener)
            # The log first: a result without its checkpoint is cut off on resuming; the reverse is lost. And
            # both before anybody is told: a round that was told of is never trained again.
            append_result(folder, result)
            save_checkpoint(folder, replace(checkpoint, model=model, flights=source.flights()))
            results.append(result)
            listener(
                Progress(model.round, experiment.rounds, len(result.clients), len(result.clients), result)
            )
    return results


def _opened(prepared: Prepared, workers: int | None, on: str) -> Pool[Sent, Returned]:
    experiment, graph = prepared.experiment, prepared.start.graph
    data = prepared.train, prepared.test, prepared.parts
    module = prepared.module if experiment.trains_floats else None
    if on == PROCESSES:
        return WorkerPool(experiment, graph, *data, workers, module)
    return RayPool(experiment, graph, *data, workers, module, on=on)


def _source(
    method: Method[Sent, Returned], prepared: Prepared, pool: Pool[Sent, Returned], began: int
) -> Source:
    """What gathers the changes of every merge: rounds, or boards as they are ready."""
    experiment, clock = prepared.experiment, prepared.experiment.clock
    if experiment.asynchronous is None or clock is None:
        return Synchronous(method, experiment, prepared.parts, pool, clock, began)
    flights = prepared.start.flights or Flights()
    integers = cast("Pool[Assignment, Update]", pool)
    return Asynchronous(buffering_method(method), experiment, prepared.parts, integers, clock, flights)


def load_data(experiment: Experiment, source: DataSource | None = None) -> tuple[Dataset, Dataset]:
    """The images an experiment trains on, and those it is tested on: of `data`, unless of a source."""
    return coded_data(experiment, *_measured(experiment, experiment.data if source is None else source))


def _measured(experiment: Experiment, data: str | DataSource) -> tuple[Samples, Samples]:
    return load_measured(
        data,
        train_limit=experiment.train_limit,
        test_limit=experiment.test_limit,
        size=experiment.size,
        task=experiment.task,
    )


def coded_data(experiment: Experiment, train: Samples, test: Samples) -> tuple[Dataset, Dataset]:
    """Both as 8-bit codes of the range that the experiment gives, or that its clients agree on by theirs."""
    train = trained_on(train, experiment.task)
    value_range = _range(experiment, train)
    coded = (each.coded(value_range) for each in (train, test))
    first, second = (resized(each, experiment.size) for each in coded)
    return first, second


def value_range_of(experiment: Experiment) -> ValueRange | None:
    """What the codes of the experiment's measured values stand for; None: its data are codes, or in 0..1."""
    if experiment.data_range is None:
        return None
    if experiment.data_range != BOARDS:
        return parse_range(experiment.data_range)
    train, _ = _measured(experiment, experiment.data)
    return _range(experiment, trained_on(train, experiment.task))


def _range(experiment: Experiment, train: Samples) -> ValueRange | None:
    if experiment.data_range is None or train.is_coded:
        return None
    if experiment.population is not None:
        # Every sample is some client's, and there may be more clients than samples.
        return range_of(experiment.data_range, [train])
    parts = [train.subset(part) for part in parts_of(experiment, train.labels)]
    return range_of(experiment.data_range, parts)


def range_of(data_range: str, parts: Sequence[Samples]) -> ValueRange:
    """The range that is given, or that clients with these samples agree on, as a server's boards do."""
    if data_range != BOARDS:
        return parse_range(data_range)
    return agreed_range([bounds for part in parts if (bounds := part.bounds()) is not None])


def _round(
    method: Method[Sent, Returned],
    model: GlobalModel,
    prepared: Prepared,
    pool: Pool[Sent, Returned],
    source: Source,
    listener: Listener,
) -> tuple[GlobalModel, RoundResult]:
    clock, experiment = Stopwatch(), prepared.experiment
    number = model.round + 1
    began = source.now

    def tell(done: int, selected: int) -> None:
        listener(Progress(number, experiment.rounds, done, selected))

    gathered = source.gather(model, tell)
    clock.end("training")
    merged = gathered.merge()
    clock.end("merging")
    evaluates = experiment.evaluates(number)
    measured = Measured(merged)
    if evaluates and method.calibrates:
        # Those of the round are at hand; what the run ends with, all measure, unless they are a population.
        everybody = number >= experiment.rounds and experiment.population is None
        measured = _calibrate(method, merged, pool, merged.clients if everybody else gathered.clients)
    merged = measured.model
    clock.end("calibrating")
    accuracies = _evaluate(method, merged, experiment, pool) if evaluates else None
    clock.end("measuring")
    losses, samples = zip(*gathered.losses, strict=True)
    timed = experiment.clock is not None
    return merged, RoundResult(
        round=number,
        accuracies=accuracies,
        loss=float(np.average(losses, weights=samples)),
        bytes_up=sum(part.bytes_up for part in gathered.parts) + measured.bytes_up,
        bytes_down=sum(part.bytes_down for part in gathered.parts) + measured.bytes_down,
        clients=tuple(client.client for client in gathered.clients),
        bit_widths=merged.bit_widths,
        seconds=sum(clock.seconds.values()),
        phases=clock.seconds,
        parts=gathered.parts,
        metric=METRICS[experiment.task].key,
        virtual_seconds=seconds(source.now - began) if timed else None,
        virtual_time=seconds(source.now) if timed else None,
    )


@dataclass(frozen=True)
class Measured:
    """A calibration: the model with its statistics, and what it cost."""

    model: GlobalModel
    bytes_up: int = 0
    bytes_down: int = 0


def _calibrate(
    method: Method[Sent, Returned],
    model: GlobalModel,
    pool: Pool[Sent, Returned],
    clients: Sequence[ClientRecord],
) -> Measured:
    """These clients measure the statistics of what they would run."""
    assignments = [method.calibration(model, client) for client in clients]
    found = pool.calibrate(assignments)
    return Measured(
        method.calibrated(model, found),
        bytes_up=sum(counted_bytes(method.graph, one) for one in found),
        bytes_down=sum(counted_bytes(method.graph, assignment) for assignment in assignments),
    )


def _evaluate(
    method: Method[Sent, Returned],
    model: GlobalModel,
    experiment: Experiment,
    pool: Pool[Sent, Returned],
) -> Accuracies:
    clients = evaluated(experiment, model)
    probes = probes_of(method, model, clients)
    scores = pool.scores(probes)
    values = [score.value for score in scores]
    deployed, mean = _deployed(probes, values, clients)
    others = {
        name: _deployed(probes, [score.others[name] for score in scores], clients)[1]
        for name in scores[0].others
    }
    return Accuracies(values[0], {} if experiment.trains_floats else deployed, mean, others)


def _deployed(
    probes: Sequence[Probe], accuracies: Sequence[float], clients: Sequence[ClientRecord]
) -> tuple[dict[str, float], float]:
    """Accuracy by budget and over all clients; each client counts for the model it runs, perhaps `W`."""
    of_client = {client.client: accuracies[0] for client in clients}
    for probe, accuracy in zip(probes, accuracies, strict=True):
        of_client |= dict.fromkeys(probe.clients, accuracy)
    budgets = sorted({client.budget for client in clients})
    by_budget = {
        f"{budget:g}": float(np.mean([of_client[c.client] for c in clients if c.budget == budget]))
        for budget in budgets
    }
    return by_budget, float(np.mean(list(of_client.values())))
