"""The computing part of a round: measure the model as it came, train it, give the update's bytes.

It runs beside the connection in a thread of its own, and ends between two batches when it is told to.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fedmpq.data.dataset import Dataset
from fedmpq.data.tasks import anomalies
from fedmpq.edge_client.board_data import BoardData
from fedmpq.edge_client.limits import CannotTakePart, Pace
from fedmpq.exchange.change import Fractions
from fedmpq.exchange.messages import Assignment, Evaluation, TrainingPlan, unpack_layers
from fedmpq.exchange.wire import encode_calibration, encode_update
from fedmpq.model.graph import Graph
from fedmpq.model.integer_forward import logits
from fedmpq.model.integer_program import compile_program
from fedmpq.model.metrics import Judge
from fedmpq.model.native_products import native_products
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.randomness import Draws
from fedmpq.model.task import CLASSIFICATION
from fedmpq.system.heap import trim_heap
from fedmpq.training.engine import Batch, Engine, EpochResult, Shift, WorkStopped
from fedmpq.training.local_calibration import run_calibration
from fedmpq.training.local_round import run_local_round

T = TypeVar("T")
Heard = Callable[[int, EpochResult], None]

THREAD_NAME, READER_NAME = "fedmpq-training", "fedmpq-reading"
EVALUATION_BATCH = 32
"""Small: activations of the integer forward are 4 bytes each."""


class StoppableEngine:
    """An engine that stops between two batches once `stop` is set, or the pace shows that there is no end."""

    def __init__(self, engine: Engine, stop: threading.Event, pace: Pace) -> None:
        self._engine = engine
        self._stop = stop
        self._pace = pace

    def load(
        self,
        graph: Graph,
        layers: Layers,
        side: Side,
        plan: TrainingPlan,
        draws: Draws,
        shift: Shift | None = None,
    ) -> None:
        self._engine.load(graph, layers, side, plan, draws, shift)

    def train_epoch(self, batches: Iterable[Batch]) -> EpochResult:
        return self._engine.train_epoch(self._until_stopped(batches))

    def layers(self) -> Layers:
        return self._engine.layers()

    def fractions(self) -> Mapping[str, Fractions]:
        return self._engine.fractions()

    def side(self) -> Side:
        return self._engine.side()

    def rest(self) -> None:
        self._engine.rest()

    def _until_stopped(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if self._stop.is_set():
                raise WorkStopped
            self._pace.batch_begins()
            yield batch


def evaluate(
    graph: Graph, assignment: Assignment, data: Dataset, threads: int, stop: threading.Event
) -> Evaluation:
    """How well the model of the assignment does on `data`, by the integer forward: how many classes it gets
    right, or the score of another task."""
    program = compile_program(graph, unpack_layers(graph, assignment.layers), assignment.side)
    products = partial(native_products, threads=threads)
    given, marks = data.labels if data.targets is None else data.targets, anomalies(data)
    judge = Judge(graph)
    for start in range(0, len(data), EVALUATION_BATCH):
        if stop.is_set():
            raise WorkStopped
        rows = slice(start, start + EVALUATION_BATCH)
        outputs = logits(program, data.images[rows], products=products)
        judge.add(outputs, data.images[rows], given[rows], None if marks is None else marks[rows])
    score = judge.score().value
    if graph.task == CLASSIFICATION:
        return Evaluation(len(data), round(score * len(data)))
    return Evaluation(len(data), 0, score)


def make_update(
    engine: Engine,
    graph: Graph,
    run_id: str,
    assignment: Assignment,
    data: BoardData,
    evaluation: Evaluation | None,
    heard: Heard,
    stop: threading.Event,
    seconds: float,
    *,
    coded: bool,
) -> bytes:
    """Trains and encodes, layers as entropy codes if `coded`; the same assignment and data give the same
    bytes. It may take so many seconds."""
    plan = assignment.plan
    pace = Pace(plan.epochs * math.ceil(len(data.train) / plan.batch_size), seconds)
    trim_heap()  # of what measuring the model has left
    try:
        update = run_local_round(StoppableEngine(engine, stop, pace), graph, assignment, data.train, heard)
    finally:
        engine.rest()
    return encode_update(graph, run_id, replace(update, evaluation=evaluation), coded=coded)


def make_calibration(
    graph: Graph,
    run_id: str,
    assignment: Assignment,
    data: BoardData,
    threads: int,
    stop: threading.Event,
    *,
    evaluates: bool,
) -> bytes:
    """Measures and encodes; the same assignment and data give the same bytes.

    If it evaluates, then the model with the statistics that it has measured.
    """
    found = run_calibration(graph, assignment, data.train, threads, stop)
    if evaluates:
        calibrated = replace(assignment, side={**assignment.side, **found.statistics})
        found = replace(found, evaluation=evaluate(graph, calibrated, data.evaluation, threads, stop))
    return encode_calibration(graph, run_id, found)


async def in_thread(work: Callable[[], T], stop: threading.Event, name: str = THREAD_NAME) -> T:
    """Runs `work` in a thread. Cancelled, it sets `stop` and waits for the end; cancelled again, it does not.

    The process does not wait for the thread when it ends: a batch on a slow board may take too long.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except MemoryError as error:
            reason = f"this board has not enough memory for it: {error}"
            _tell(loop, outcome.set_exception, CannotTakePart(reason))
        except BaseException as error:
            _tell(loop, outcome.set_exception, error)
        else:
            _tell(loop, outcome.set_result, result)
        finally:
            trim_heap()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        return await asyncio.shield(outcome)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({outcome})
        outcome.exception()  # or asyncio would complain that nobody looked
        raise
    finally:
        if outcome.done():
            thread.join()


def _tell(loop: asyncio.AbstractEventLoop, setter: Callable[[T], None], value: T) -> None:
    # The loop is gone when the process no longer waits for this thread.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(setter, value)
