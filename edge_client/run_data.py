"""The run that the server describes: its graph, and this board's samples as its model takes them.

They are made ready as soon as a run is described, and the server is told that they are, or why they cannot
be: a board whose data do not fit, or that is too small, is then not chosen for a round.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import grpc.aio

from fedmpq.data.dataset import DataError
from fedmpq.data.fitting import Form
from fedmpq.data.value_range import ValueRange
from fedmpq.edge_client.board_data import BoardData, BoardSource
from fedmpq.edge_client.connection import Connection, said
from fedmpq.edge_client.disk_space import is_full
from fedmpq.edge_client.limits import CannotTakePart
from fedmpq.edge_client.round_work import READER_NAME, in_thread
from fedmpq.edge_client.transfer import Patience, decline, ready
from fedmpq.exchange.messages import PlanError, TrainingPlan
from fedmpq.exchange.wire import WireError, plan_from_message
from fedmpq.model.graph import Graph
from fedmpq.model.ops import GraphError
from fedmpq.proto import federation_pb2 as pb
from fedmpq.system.logs import with_facts

CANNOT_PREPARE = (CannotTakePart, PlanError, WireError, GraphError, DataError)
"""Why a board cannot take part in a run at all."""

log = logging.getLogger("fedmpq.client")


@dataclass(frozen=True)
class RunData:
    """A run that this board can take part in."""

    description: pb.RunDescription
    graph: Graph
    data: BoardData


class PreparesRuns(Protocol):
    """What a session does for the preparation of a run."""

    async def graph(self, run: pb.RunDescription) -> Graph:
        """The run's graph, downloaded if it is not here."""
        ...

    def check_plan(self, graph: Graph, plan: TrainingPlan, data: BoardData) -> None:
        """Raises CannotTakePart for a training that takes more than this board gives."""
        ...

    def wait_for_space(self) -> None:
        """The disk has no room for the graph: others may take this board's place until it has."""
        ...


class Runs:
    """The run at work, prepared once; a description that is repeated is answered again."""

    def __init__(
        self,
        session: PreparesRuns,
        source: BoardSource,
        connection: Connection,
        patience: Patience,
        failed: Callable[[BaseException], None],
    ) -> None:
        self._session = session
        self._source = source
        self._connection = connection
        self._patience = patience
        self._failed = failed
        self._described: pb.RunDescription | None = None
        self._work: asyncio.Task[RunData] | None = None
        self._answer: asyncio.Task[None] | None = None

    def describe(self, run: pb.RunDescription) -> None:
        """The server has described a run: prepare it, or say again how that went."""
        known = self._described
        if known is None or _in_words(known) != _in_words(run):
            log.info("run %s", _in_words(run))
        if known is None or _what_counts(known) != _what_counts(run):
            self._drop()
        self._described = run
        if self._work is None or (self._work.done() and self._work.exception() is not None):
            self._work = asyncio.create_task(self._prepared(run))
            self._work.add_done_callback(self._look)
        # One that is on its way may have reached a stream that is no more.
        if self._answer is not None:
            self._answer.cancel()
        self._answer = asyncio.create_task(self._answered(run))
        self._answer.add_done_callback(self._look)

    async def of(self, run_id: str) -> RunData:
        """The run, once it is prepared; raises why it cannot be."""
        if self._work is None or self._described is None or self._described.run_id != run_id:
            raise WireError(f"its run {run_id!r} was not described")
        if self._work.done() and await asyncio.to_thread(self._source.has_changed):
            return await self._renewed(self._described)
        prepared = await asyncio.shield(self._work)
        # The number of rounds may have changed since.
        return replace(prepared, description=self._described)

    async def _renewed(self, run: pb.RunDescription) -> RunData:
        """The run with the samples that are there now."""
        log.info("the files of this board's data have changed: they are read again")
        self._work = asyncio.create_task(self._prepared(run))
        self._work.add_done_callback(self._look)
        renewed = await asyncio.shield(self._work)
        if not await self._say_ready(renewed):
            # An old server takes an update of more samples only after a hello that says so.
            self._connection.renew()
        return renewed

    def forget(self, run_id: str) -> None:
        """The run is over."""
        if self._described is not None and self._described.run_id == run_id:
            self._drop()

    async def end(self) -> None:
        tasks: set[asyncio.Task[Any]] = {task for task in (self._work, self._answer) if task is not None}
        self._drop()
        if tasks:
            await asyncio.wait(tasks)

    def _drop(self) -> None:
        for task in (self._work, self._answer):
            if task is not None:
                task.cancel()
        self._described = self._work = self._answer = None

    async def _prepared(self, run: pb.RunDescription) -> RunData:
        graph = await self._session.graph(run)
        image, names = graph.input, tuple(run.class_names)
        value_range = ValueRange(tuple(run.low), tuple(run.high)) if run.low else None
        form = Form(image.height, image.width, image.channels, value_range, graph.task)
        data = await in_thread(partial(self._source.load, form, names), threading.Event(), READER_NAME)
        _tell_data(data)
        if run.HasField("plan"):
            self._session.check_plan(graph, plan_from_message(run.plan), data)
        return RunData(run, graph, data)

    async def _answered(self, run: pb.RunDescription) -> None:
        """Tells the server how many samples this board has for the run, or why it cannot take part."""
        assert self._work is not None
        try:
            prepared = await asyncio.shield(self._work)
        except CANNOT_PREPARE as error:
            facts = with_facts({"run": run.run_id})
            log.error("run %s: this board cannot take part: %s", run.run_id, error, extra=facts)
            refusal = pb.DeclineRequest(reason=str(error))
            await self._connection.persist(
                "the refusal", partial(decline, request=refusal, patience=self._patience)
            )
            return
        # `_look` has told of it.
        except Exception:
            return
        await self._say_ready(prepared)

    async def _say_ready(self, prepared: RunData) -> bool:
        """Tells the server of how many samples; whether it is one that wants to know."""
        samples = len(prepared.data.train)
        self._connection.says_samples(samples)
        request = pb.ReadyRequest(run_id=prepared.description.run_id, samples=samples)
        attempt = partial(ready, request=request, patience=self._patience)
        return await self._connection.persist("the answer", attempt)

    def _look(self, work: asyncio.Task[Any]) -> None:
        """An error that is not the run's ends the session; one of the server is told, and tried again when it
        describes the run again."""
        if work.cancelled() or (error := work.exception()) is None or isinstance(error, CANNOT_PREPARE):
            return
        if isinstance(error, grpc.aio.AioRpcError):
            log.error("the run was not taken up here, the server said: %s", said(error))
        elif is_full(error):
            self._session.wait_for_space()
        else:
            self._failed(error)


def _in_words(run: pb.RunDescription) -> str:
    return f"{run.run_id} ({run.name}): {run.rounds} rounds, {len(run.class_names)} classes"


def _what_counts(run: pb.RunDescription) -> tuple[object, ...]:
    """What decides whether samples that were read for one description serve another."""
    return run.run_id, run.graph_id, tuple(run.class_names), tuple(run.low), tuple(run.high)


def _tell_data(data: BoardData) -> None:
    train = data.train
    if train.skipped:
        where, reason = train.skipped[0]
        log.warning("%d files are left out, such as %s: %s", len(train.skipped), where, reason)
    log.info("%d samples of %dx%dx%d", len(train), *train.image_shape)
