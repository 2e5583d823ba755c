"""One client's share of a calibration: the model it was sent, measured on some of its own images."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Assignment, Calibration, rounded_side, unpack_layers
from fedmpq.model.calibration import calibration_batches, measure
from fedmpq.model.graph import Graph
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import WorkStopped
from fedmpq.training.local_round import check_data


def run_calibration(
    graph: Graph,
    assignment: Assignment,
    data: Dataset,
    threads: int = 1,
    stop: threading.Event | None = None,
) -> Calibration:
    """Measure the statistics of `assignment`; WorkStopped between two batches once `stop` is set."""
    check_data(graph, data, assignment.client)
    draws = Draws(assignment.seed, assignment.client, assignment.round)
    batches = _until(stop, calibration_batches(draws, assignment.plan.batch_size, data.images))
    layers = unpack_layers(graph, assignment.layers)
    statistics = measure(graph, layers, assignment.side, batches, threads)
    sent = rounded_side(statistics, assignment.plan.side_bits)
    return Calibration(assignment.round, assignment.client, len(data), sent)


def _until(stop: threading.Event | None, batches: Iterator[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    for batch in batches:
        if stop is not None and stop.is_set():
            raise WorkStopped
        yield batch
