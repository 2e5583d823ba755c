"""What boards call for the models they run: GetModel and ReportModel."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc

from fedmpq.model.export_formats import FORMATS
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.enrolment_calls import RETRY_AFTER
from fedmpq.server.exports import ExportFailed
from fedmpq.server.rate_limit import Rate, RateLimit
from fedmpq.server.refusals import Context, refuse, refuse_argument
from fedmpq.server.rollouts import Offer, ask_again_seconds
from fedmpq.server.store.errors import NoVersion, UnknownRelease
from fedmpq.server.store.records import Client, ModelReport
from fedmpq.system.named_object import is_path

if TYPE_CHECKING:
    from fedmpq.server.at_work import AtWork

MAX_COUNT = 1 << 40
MAX_VERSION = (1 << 31) - 1
NO_VERSION_SECONDS = 60
REPORTS = Rate(20, 5.0)
"""By one client: each is a transaction that is flushed to disk."""
ALL_REPORTS = Rate(1000, 0.02)


class ModelCalls:
    def __init__(self, at_work: AtWork) -> None:
        self._at_work = at_work
        self._store = at_work.store
        self._exports = at_work.exports
        self._rollouts = at_work.rollouts
        self._reports = RateLimit(REPORTS, ALL_REPORTS)

    async def offer(self, client: Client, wanted: str, context: Context) -> pb.ModelOffer:
        if wanted not in FORMATS and not is_path(wanted):
            await refuse_argument(
                context, f"a model's format is one of {', '.join(FORMATS)}, or the run's own"
            )
        try:
            offer = await self._rollouts.offer(client.client_id, wanted)
            offer = offer or await self._newest(client, wanted, context)
        except NoVersion as error:
            context.set_trailing_metadata(((RETRY_AFTER, str(NO_VERSION_SECONDS)),))
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except ExportFailed as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, f"the server cannot export: {error}")
        return await self._lent(client, offer, context)

    async def _newest(self, client: Client, wanted: str, context: Context) -> Offer:
        """The newest model of the client's newest run."""
        part = await asyncio.to_thread(self._store.latest_part, client.client_id)
        if part is None:
            message = "this client is in no run that has a model to hand out yet"
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, message)
        run, number = part
        # Only the operator names code to be loaded, in the run's settings; a board cannot.
        if wanted not in FORMATS and wanted not in run.config.get("export", ()):
            await refuse_argument(context, f"run {run.name!r} does not export to {wanted!r}")
        return Offer(run, await self._exports.model_of(run, number, wanted), None)

    async def _lent(self, client: Client, offer: Offer, context: Context) -> pb.ModelOffer:
        outgoing, file = self._at_work.outgoing, offer.file
        outgoing.lend(file.name, file.path)
        await self._exports.tidy(offer.run, outgoing, self._store.released_rounds)
        if (size := await asyncio.to_thread(outgoing.size, file.name)) is None:
            message = "the model was replaced by a newer one just now: retry"
            await refuse(context, grpc.StatusCode.UNAVAILABLE, message)
        release = offer.release
        return pb.ModelOffer(
            payload=file.name,
            payload_bytes=size,
            file_name=f"{client.name}{file.suffix}",
            card=file.card,
            version=0 if release is None else release.version,
            ask_again_seconds=0 if release is None else ask_again_seconds(release),
        )

    async def report(
        self, client: Client, request: pb.ReportModelRequest, reason: str, context: Context
    ) -> None:
        if wait := self._reports.take(client.client_id):
            context.set_trailing_metadata(((RETRY_AFTER, str(int(wait) + 1)),))
            message = "this client reports too often: retry later"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        if not 1 <= request.version <= MAX_VERSION:
            await refuse_argument(context, f"there is no version {request.version}")
        if max(request.ok, request.errors) > MAX_COUNT:
            await refuse_argument(context, f"a report counts no more than {MAX_COUNT} checks")
        report = ModelReport(
            request.version, request.format, request.ok, request.errors, reason, request.running
        )
        try:
            await self._rollouts.report(client.client_id, report)
        except UnknownRelease as error:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
