"""What the operator's `fedmpq rollout` asks of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc

from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.exports import ExportFailed
from fedmpq.server.refusals import Context, answering, refuse
from fedmpq.server.rollout_status import release_status, rollouts_status
from fedmpq.server.rollouts import Plan
from fedmpq.server.store.errors import StoreError, UnknownRun
from fedmpq.server.store.records import Release

if TYPE_CHECKING:
    from fedmpq.server.coordinator import Coordinator

T = TypeVar("T")
FAILED = grpc.StatusCode.ABORTED
"""A database that fails; UNAVAILABLE would mean that no server runs."""


class RolloutCalls:
    """The part of the Administration service that is about versions of models."""

    _coordinator: Coordinator

    async def StartRollout(self, request: pb.StartRolloutRequest, context: Context) -> pb.ReleaseStatus:
        plan = Plan(request.canary, request.max_errors, request.soak_seconds)
        rollouts, formats = self._coordinator.rollouts, list(request.formats)
        return await self._answer(
            lambda: self._status_of(rollouts.start(request.run_id, request.round, plan, formats)), context
        )

    async def RollBack(self, request: pb.RunRequest, context: Context) -> pb.ReleaseStatus:
        rollouts = self._coordinator.rollouts
        return await self._answer(lambda: self._status_of(rollouts.roll_back(request.run_id)), context)

    async def GetRollouts(self, request: pb.GetRolloutsRequest, context: Context) -> pb.RolloutsStatus:
        return await self._answer(self._rollouts, context)

    async def PinBoard(self, request: pb.PinBoardRequest, context: Context) -> pb.RolloutsStatus:
        async def pin() -> pb.RolloutsStatus:
            await self._coordinator.rollouts.pin(request.name, request.version)
            return await self._rollouts()

        return await self._answer(pin, context)

    async def _rollouts(self) -> pb.RolloutsStatus:
        return await asyncio.to_thread(rollouts_status, self._coordinator.store)

    async def _status_of(self, changing: Awaitable[Release]) -> pb.ReleaseStatus:
        release = await changing
        return await asyncio.to_thread(release_status, self._coordinator.store, release)

    async def _answer(self, work: Callable[[], Awaitable[T]], context: Context) -> T:
        async with answering(context, FAILED):
            try:
                return await work()
            except UnknownRun as error:
                await refuse(context, grpc.StatusCode.NOT_FOUND, str(error))
            except (StoreError, ExportFailed) as error:
                await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        raise AssertionError("answered or refused")
