"""What a client does with the server's events: it downloads each assignment, trains or measures, and uploads.

The current round is a task of its own. It goes on while there is no connection, and waits for one only
where it needs it. A new assignment, a cancellation or the end of the run ends it. After a crash the next
start goes on with what is in the state folder: an update is delivered, a download goes on where it broke,
and training begins anew, with the same result to the bit.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from fedmpq.data.dataset import DataError
from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.board_data import BoardData, BoardSource
from fedmpq.edge_client.channel import Endpoint
from fedmpq.edge_client.chunk_length import ChunkLength
from fedmpq.edge_client.conditions import Conditions, NotNow
from fedmpq.edge_client.connection import Connection, said
from fedmpq.edge_client.disk_space import is_full
from fedmpq.edge_client.limits import CannotTakePart, Limits
from fedmpq.edge_client.outbox import Pending, RoundKey
from fedmpq.edge_client.refusals import Refusals, enrol_on_full_disk
from fedmpq.edge_client.round_work import (
    EVALUATION_BATCH,
    evaluate,
    in_thread,
    make_calibration,
    make_update,
)
from fedmpq.edge_client.run_data import RunData, Runs
from fedmpq.edge_client.state_folder import StateFolder
from fedmpq.edge_client.transfer import Delivery, Patience, download, have, received, wanted_payload
from fedmpq.exchange.messages import Assignment, Evaluation, PlanError, TrainingPlan
from fedmpq.exchange.wire import (
    WireError,
    decode_model,
    model_bytes_bound,
    phase_from_message,
    phase_to_message,
    plan_from_message,
)
from fedmpq.model.graph import Graph
from fedmpq.model.metrics import METRICS
from fedmpq.model.ops import GraphError
from fedmpq.model.quantized import average_bits
from fedmpq.model.state_checks import ProgramError
from fedmpq.model.task import CLASSIFICATION, Task
from fedmpq.proto import federation_pb2 as pb
from fedmpq.system.logs import with_facts
from fedmpq.training.engine import Engine, EpochResult, TrainingError

MAX_GRAPH_BYTES = 16 << 20
_CANNOT = (CannotTakePart, TrainingError, PlanError, WireError, GraphError, ProgramError, DataError)
"""Why a round cannot be done here; the server is told, and goes on without this board."""

log = logging.getLogger("fedmpq.client")


@dataclass(frozen=True)
class Board:
    """What this board brings to the federation."""

    name: str
    budget: float
    data: BoardSource
    engine: Engine
    engine_text: str
    """For the operator's table, such as "native (avx2)"."""
    threads: int
    limits: Limits = field(default_factory=Limits)
    conditions: Conditions = field(default_factory=Conditions)


@dataclass(frozen=True)
class Settings:
    """How the session behaves, whatever it trains."""

    token: str = field(default="", repr=False)
    """Empty if the client is enrolled already."""
    retry: Backoff = field(default_factory=lambda: Backoff(1.0, 60.0))
    patience: Patience = field(default_factory=Patience)
    exit_when_done: bool = False


@dataclass(frozen=True)
class _Job:
    """The current round."""

    key: RoundKey
    task: asyncio.Task[None]


class Session:
    """Takes part in runs until an error, or until the end of a run if the settings say so."""

    def __init__(self, endpoint: Endpoint, state: StateFolder, board: Board, settings: Settings) -> None:
        self._endpoint = endpoint
        self._state = state
        self._board = board
        self._settings = settings
        self._chunks = ChunkLength()
        self._job: _Job | None = None
        self._sent: Pending | None = None
        # A round that was called off holds the engine until its batch has ended.
        self._engine_free = asyncio.Lock()

    async def run(self) -> None:
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._connection = await self._enrolled()
        retry, patience = self._settings.retry, self._settings.patience
        self._refusals = Refusals(self._connection, self._state.folder, retry, patience)
        self._runs = Runs(self, self._board.data, self._connection, patience, self._fail)
        listener = asyncio.create_task(self._connection.keep_listening(self._hear))
        try:
            await asyncio.wait({listener, self._over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.cancel()
            await asyncio.wait({listener})
            await self._drop_job()
            await self._runs.end()
            self._refusals.end()
            self._over.cancel()
        if not listener.cancelled():
            listener.result()
        self._over.result()

    async def _enrolled(self) -> Connection:
        board, settings, state = self._board, self._settings, self._state
        own = version("fedmpq")
        request = pb.EnrollRequest(token=settings.token, name=board.name, budget=board.budget, version=own)
        patience = settings.patience.chunk
        identity = await enrol_on_full_disk(self._endpoint, request, state, settings.retry, patience)
        hello = pb.ListenRequest(budget=board.budget, samples=board.data.samples, version=own)
        hello.engine = board.engine_text
        hello.answers = hello.confirms = True
        if (bounds := board.data.bounds) is not None:
            hello.low.extend(bounds.low)
            hello.high.extend(bounds.high)
        return Connection(self._endpoint, identity, state.identity, hello, settings.retry, patience)

    # Events

    async def _hear(self, event: pb.Event) -> None:
        kind = event.WhichOneof("event")
        if kind == "welcome":
            self._welcome(event.welcome)
        elif kind == "run":
            self._runs.describe(event.run)
        elif kind == "assignment":
            await self._assign(event.assignment)
        elif kind == "cancelled":
            await self._cancel(event.cancelled)
        elif kind == "run_ended":
            await self._end_run(event.run_ended)

    def _welcome(self, welcome: pb.Welcome) -> None:
        self._chunks.wish(welcome.chunk_bytes)
        log.info("connected to %s (fedmpq %s)", self._endpoint.address, welcome.server_version or "unknown")
        if self._job is None and (waiting := self._state.outbox.pending()) is not None:
            key = waiting.key
            log.info("round %d: its %s was not delivered yet", key.round, _answer(key), extra=_facts(key))
            self._start(key, self._deliver(waiting, resumed=True))

    async def _assign(self, assignment: pb.Assignment) -> None:
        try:
            phase = phase_from_message(assignment.phase)
        except WireError as error:
            log.error("round %d: cannot be done here: %s", assignment.round, error)
            return
        key = RoundKey(assignment.run_id, assignment.round, phase, assignment.payload)
        if self._job is not None and self._job.key == key:
            return
        await self._drop_job()
        self._start(key, self._take_part(key, assignment))

    async def _cancel(self, cancelled: pb.Cancelled) -> None:
        address = cancelled.run_id, cancelled.round, cancelled.phase
        if self._job is not None and _address(self._job.key) == address:
            facts = _facts(self._job.key)
            log.warning(
                "round %d: goes on without this client: %s", cancelled.round, cancelled.reason, extra=facts
            )
            await self._drop_job()
            self._state.outbox.clear()
        elif self._sent is not None and _address(self._sent.key) == address:
            key, self._sent = self._sent.key, None
            text = "round %d: the %s that was delivered does not count: %s"
            log.warning(text, key.round, _answer(key), cancelled.reason, extra=_facts(key))

    async def _end_run(self, ended: pb.RunEnded) -> None:
        log.info(
            "run %s: %s",
            ended.run_id,
            ended.state,
            extra=with_facts({"run": ended.run_id, "state": ended.state}),
        )
        if self._job is not None and self._job.key.run_id == ended.run_id:
            await self._drop_job()
            self._state.outbox.clear()
        self._runs.forget(ended.run_id)
        try:
            await self._connection.confirm(ended.run_id)
        finally:
            # Also if the stream was renewed meanwhile: a server that knows does not tell of it again.
            if self._settings.exit_when_done and not self._over.done():
                self._over.set_result(None)

    # The current round

    def _start(self, key: RoundKey, work: Coroutine[Any, Any, None]) -> None:
        self._job = _Job(key, asyncio.create_task(self._guarded(key, work)))

    async def _drop_job(self) -> None:
        if self._job is not None:
            job, self._job = self._job, None
            job.task.cancel()
            await asyncio.wait({job.task})

    async def _guarded(self, key: RoundKey, work: Coroutine[Any, Any, None]) -> None:
        """Logs and leaves a round that cannot be done here, and tells the server; any other error ends the
        session."""
        try:
            try:
                await work
            except _CANNOT as error:
                await self._refusals.give_up(key, str(error))
            except NotNow as reason:
                self._refusals.wait_for(key, str(reason), self._board.conditions)
            except MemoryError:
                await self._refusals.give_up(key, "this board has not enough memory for it")
            except OSError as error:
                if not is_full(error):
                    raise
                self._refusals.wait_for_space(key)
        except grpc.aio.AioRpcError as error:
            log.error("round %d: left, the server said: %s", key.round, said(error), extra=_facts(key))
        except Exception as error:
            self._fail(error)
        finally:
            if self._job is not None and self._job.task is asyncio.current_task():
                self._job = None

    def _fail(self, error: BaseException) -> None:
        """The session ends with this error."""
        if not self._over.done():
            self._over.set_exception(error)

    async def _take_part(self, key: RoundKey, assignment: pb.Assignment) -> None:
        if await self._refusals.refuse_again(key):
            return
        pending = self._state.outbox.pending()
        if pending is not None and pending.key == key:
            await self._deliver(pending, resumed=True)
            return
        self._state.outbox.clear()
        if self._sent is not None and self._sent.key == key and await self._was_received(self._sent):
            return
        run = await self._runs.of(key.run_id)
        work = self._work(key, assignment, run)
        await self._deliver(await self._board.conditions.during(work), resumed=False)

    async def _was_received(self, sent: Pending) -> bool:
        """An assignment repeated while its update was on the way is no reason to train again."""
        attempt = partial(received, pending=sent, patience=self._settings.patience)
        status = await self._connection.persist("the question for the receipt", attempt)
        return status.HasField("receipt")

    async def _work(self, key: RoundKey, assignment: pb.Assignment, run: RunData) -> Pending:
        graph, data = run.graph, run.data
        self._check(graph, assignment, run.description)
        # The model and its update.
        self._refusals.needed_bytes = 2 * assignment.payload_bytes
        self._check_needs(graph, key, assignment, data)
        path = await self._payload(*wanted_payload(assignment), self._state.downloads)
        order = _order(graph, assignment, path.read_bytes())
        async with self._engine_free:
            if key.phase == "training":
                answer = await self._train(key, graph, order, data, assignment)
            else:
                answer = await self._measure(key, graph, order, data, assignment.evaluate)
        pending = self._state.outbox.put(key, answer, wait=False)
        path.unlink(missing_ok=True)
        return pending

    async def _measure(
        self, key: RoundKey, graph: Graph, order: Assignment, data: BoardData, evaluates: bool
    ) -> bytes:
        stop, threads = threading.Event(), self._board.threads
        measuring = partial(make_calibration, graph, key.run_id, order, data, threads, stop)
        return await in_thread(partial(measuring, evaluates=evaluates), stop)

    async def _train(
        self, key: RoundKey, graph: Graph, order: Assignment, data: BoardData, asked: pb.Assignment
    ) -> bytes:
        stop, board, evaluation = threading.Event(), self._board, None
        if asked.evaluate:
            measuring = partial(evaluate, graph, order, data.evaluation, board.threads, stop)
            evaluation = await in_thread(measuring, stop)
            _tell_evaluation(key, graph.task, evaluation)
        heard = partial(_tell_epoch, key, graph.task, order.plan.epochs)
        training = partial(make_update, board.engine, graph, key.run_id, order, data, evaluation, heard, stop)
        return await in_thread(partial(training, board.limits.seconds, coded=asked.reads_coded), stop)

    def _check_needs(self, graph: Graph, key: RoundKey, assignment: pb.Assignment, data: BoardData) -> None:
        """Refuses a round that takes more than this board gives."""
        board, plan = self._board, plan_from_message(assignment.plan)
        evaluated = len(data.evaluation) if assignment.evaluate else 0
        board.limits.check(
            graph, plan, key.phase, data, evaluated=evaluated, batch=EVALUATION_BATCH, threads=board.threads
        )

    def _check(self, graph: Graph, assignment: pb.Assignment, run: pb.RunDescription) -> None:
        """Refuses an assignment whose faults show before its model is downloaded."""
        bits, number = tuple(assignment.bit_widths), assignment.round
        classes = graph.shapes[graph.output][0]
        if graph.task != "reconstruction" and classes != len(run.class_names):
            raise WireError(f"the model has {classes} classes, the run names {len(run.class_names)}")
        if len(bits) != len(graph.layers):
            raise WireError(f"{len(bits)} bit-widths are dealt to the model's {len(graph.layers)} layers")
        if (length := wanted_payload(assignment)[1]) > (most := model_bytes_bound(graph)):
            raise WireError(f"its model is {length} bytes long, at most {most} can be")
        average, budget = average_bits(bits, graph.layer_sizes), self._board.budget
        what = "training" if assignment.phase == pb.TRAINING else "statistics"
        log.info(
            "round %d of %d, %s: %s at %.2f bits per weight, %d bytes",
            *(number, run.rounds, what, graph.name, average, length),
            extra=with_facts({"run": run.run_id, "round": number, "bits": round(average, 4)}),
        )
        if average > budget:
            log.warning("round %d: %.2f bits per weight exceed the budget of %g", number, average, budget)

    # For the preparation of a run

    def check_plan(self, graph: Graph, plan: TrainingPlan, data: BoardData) -> None:
        board = self._board
        board.limits.check(
            graph, plan, "training", data, evaluated=0, batch=EVALUATION_BATCH, threads=board.threads
        )

    def wait_for_space(self) -> None:
        self._refusals.wait_for_space(None)

    async def graph(self, run: pb.RunDescription) -> Graph:
        if not 0 < run.graph_bytes <= MAX_GRAPH_BYTES:
            raise GraphError(f"the graph is {run.graph_bytes} bytes long, at most {MAX_GRAPH_BYTES} can be")
        self._refusals.needed_bytes = run.graph_bytes
        path = await self._payload(run.graph_id, run.graph_bytes, self._state.graphs)
        return Graph.from_bytes(path.read_bytes())

    async def _payload(self, payload: bytes, size: int, folder: Path) -> Path:
        """The file of that hash in `folder`, downloaded if it is not there; all others are removed."""
        path = folder / payload.hex()
        for other in folder.iterdir():
            if not other.name.startswith(path.name):
                other.unlink()
        if not have(path, payload):
            attempt = partial(
                download,
                payload=payload,
                size=size,
                path=path,
                patience=self._settings.patience,
                chunks=self._chunks,
            )
            await self._connection.persist("the download", attempt)
        return path

    async def _deliver(self, pending: Pending, resumed: bool) -> None:
        """Uploads until the server gives its receipt, or says that it does not want the update."""
        key, facts = pending.key, _facts(pending.key)
        what = _answer(key)
        delivery = Delivery(pending, self._chunks, self._settings.patience, resumed)
        try:
            receipt = await self._connection.persist("the upload", delivery)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self._refusals.remember(key, said(error))
                log.error(
                    "round %d: the server rejected its %s: %s", key.round, what, said(error), extra=facts
                )
            else:
                log.warning("round %d: the %s came too late: %s", key.round, what, said(error), extra=facts)
        else:
            self._sent = pending
            facts = _facts(key, bytes=pending.size, receipt=receipt.receipt_id)
            log.info("round %d: %s of %d bytes delivered", key.round, what, pending.size, extra=facts)
        self._state.outbox.clear()


def _order(graph: Graph, assignment: pb.Assignment, payload: bytes) -> Assignment:
    layers, side = decode_model(graph, payload)
    plan = plan_from_message(assignment.plan)
    return Assignment(assignment.seed, assignment.round, assignment.client, layers, side, plan)


def _address(key: RoundKey) -> tuple[str, int, int]:
    """How a Cancelled event names the round."""
    return key.run_id, key.round, phase_to_message(key.phase)


def _answer(key: RoundKey) -> str:
    return "update" if key.phase == "training" else "calibration"


def _facts(key: RoundKey, **more: int | float | str) -> dict[str, Any]:
    """What the log tells of a round beside the sentence."""
    return with_facts({"run": key.run_id, "round": key.round, **more})


def _tell_evaluation(key: RoundKey, task: Task, evaluation: Evaluation) -> None:
    if evaluation.score is not None:
        metric = METRICS[task]
        log.info(
            "round %d: the model as received has %s %s on %d samples",
            *(key.round, metric.title, metric.text(evaluation.score), evaluation.samples),
            extra=_facts(key, samples=evaluation.samples, **{metric.key: evaluation.score}),
        )
        return
    log.info(
        "round %d: the model as received gets %d of %d samples right",
        *(key.round, evaluation.correct, evaluation.samples),
        extra=_facts(key, correct=evaluation.correct, samples=evaluation.samples),
    )


def _tell_epoch(key: RoundKey, task: Task, epochs: int, epoch: int, result: EpochResult) -> None:
    if task != CLASSIFICATION:
        log.info(
            "round %d: epoch %d of %d: loss %.4f",
            *(key.round, epoch + 1, epochs, result.loss),
            extra=_facts(key, epoch=epoch + 1, loss=result.loss),
        )
        return
    log.info(
        "round %d: epoch %d of %d: loss %.4f, accuracy %.1f %%",
        *(key.round, epoch + 1, epochs, result.loss, 100 * result.accuracy),
        extra=_facts(key, epoch=epoch + 1, loss=result.loss, accuracy=result.accuracy),
    )
