"""The clients of an experiment: which samples each has, who is in a round, and whose record is kept.

Few clients are all known from the start. Of a population only those are kept that have taken part in a
round, and its first clients, one for each budget, which stand for all others: memory and time go by who
takes part, and not by how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fedmpq.lab.drawn_partition import DrawnPartition
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.partition import Indices, PartitionError, PartsOnDemand, dirichlet_partition
from fedmpq.lab.pool import Parts
from fedmpq.method.quantized_method import select_clients
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.model.randomness import SERVER, Draws, Purpose
from fedmpq.system.named_object import load_attribute


def parts_of(experiment: Experiment, labels: NDArray[np.int64]) -> Parts:
    """The training samples of each client."""
    if experiment.partition is not None:
        function = load_attribute(experiment.partition, "partition")
        made = cast("Callable[..., Any]", function)(labels, experiment.clients, experiment.seed)
        return OwnParts(experiment.partition, made, experiment.clients, len(labels))
    if experiment.population is not None:
        return DrawnPartition(
            labels, experiment.population, experiment.alpha, experiment.seed, experiment.client_samples
        )
    return tuple(
        dirichlet_partition(
            labels, experiment.clients, experiment.alpha, experiment.seed, min_per_client=MIN_SAMPLES
        )
    )


class OwnParts(PartsOnDemand):
    """The parts that a function of the user's own gives, each looked at when it is asked for."""

    def __init__(self, name: str, parts: Any, clients: int, samples: int) -> None:
        super().__init__(clients)
        self._name, self._parts, self._samples = name, parts, samples

    def part(self, client: int) -> Indices:
        part = np.asarray(self._parts[client])
        if part.ndim != 1 or not np.issubdtype(part.dtype, np.integer) or len(part) < MIN_SAMPLES:
            raise PartitionError(
                f"partition {self._name!r} gives client {client} an array of shape {part.shape} and type "
                f"{part.dtype}; it must be {MIN_SAMPLES} whole numbers or more"
            )
        if part.min() < 0 or part.max() >= self._samples:
            raise PartitionError(
                f"partition {self._name!r} gives client {client} the samples {part.min()} to {part.max()}, "
                f"and there are 0 to {self._samples - 1}"
            )
        return part.astype(np.int64)


def first_clients(experiment: Experiment, parts: Parts) -> list[ClientRecord]:
    """The clients that are known before the first round."""
    return [_record(experiment, parts, client) for client in range(len(experiment.budgets))]


def _record(experiment: Experiment, parts: Parts, client: int) -> ClientRecord:
    # Of a drawn part the size is known without drawing it.
    drawn = experiment.population is not None and experiment.partition is None
    samples = experiment.client_samples if drawn else len(parts[client])
    return ClientRecord(client, experiment.budget_of(client), samples)


def chosen(experiment: Experiment, parts: Parts, model: GlobalModel) -> list[ClientRecord]:
    """The clients of the model's next round, in the order of their numbers."""
    count, number = experiment.clients_per_round, model.round + 1
    if experiment.population is None:
        return select_clients(model.clients, experiment.seed, number, count)
    known = {record.client: record for record in model.clients}
    numbers = drawn_numbers(experiment.seed, number, experiment.population, count)
    return [known.get(one) or _record(experiment, parts, one) for one in numbers]


def record_of(experiment: Experiment, parts: Parts, model: GlobalModel, client: int) -> ClientRecord:
    """What the model knows of a client, or what there is to know of one that was never chosen."""
    if experiment.population is None:
        return model.clients[client]
    known = (record for record in model.clients if record.client == client)
    return next(known, None) or _record(experiment, parts, client)


def drawn_numbers(seed: int, round_number: int, population: int, count: int) -> list[int]:
    """`count` of the numbers below `population`, without replacement, in ascending order.

    Numbers are drawn one after the other and those that were drawn before are passed over. Of more than half
    of all, those that are left out are drawn instead.
    """
    if 2 * count > population:
        left_out = set(drawn_numbers(seed, round_number, population, population - count))
        return [number for number in range(population) if number not in left_out]
    draws = Draws(seed, SERVER, round_number)
    drawn: dict[int, None] = {}
    step = 0
    while len(drawn) < count:
        # A single uniform number has 24 bits, too few to choose evenly among millions.
        high, low = draws.uniform(2 * count, Purpose.SELECT, step=step).astype(np.float64).reshape(2, -1)
        drawn |= dict.fromkeys(((high + low * 2.0**-24) * population).astype(np.int64).tolist())
        step += 1
    return sorted(list(drawn)[:count])


def knowing(model: GlobalModel, clients: Sequence[ClientRecord]) -> GlobalModel:
    """The model with the records of these clients too."""
    records = {record.client: record for record in (*clients, *model.clients)}
    if len(records) == len(model.clients):
        return model
    return replace(model, clients=tuple(records[number] for number in sorted(records)))


def evaluated(experiment: Experiment, model: GlobalModel) -> Sequence[ClientRecord]:
    """The clients whose models are evaluated: all of few, the first ones of a population."""
    return model.clients[: len(experiment.budgets)]
