"""Enrolment: a token in, an identity out; so often and no more, and all of it in the log."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import NoReturn

import grpc
import grpc.aio

from fedmpq.model.grid import MAX_BITS
from fedmpq.proto import federation_pb2 as pb
from fedmpq.server.authentication import certificate_name, make_secret, secret_hash
from fedmpq.server.names import NAME
from fedmpq.server.rate_limit import Rate, RateLimit, address_of
from fedmpq.server.refusals import Context, refuse
from fedmpq.server.store.errors import NameTaken, TokenRefused, UnknownToken
from fedmpq.server.store.protocol import Enrolment
from fedmpq.server.tokens import looks_like_token, token_digest, token_id_of
from fedmpq.system.logs import say

RETRY_AFTER = "retry-after"
"""In the trailing metadata of a refusal: whole seconds after which another try may go better."""
FAILED_EACH, FAILED_TOTAL = Rate(20, 3.0), Rate(200, 0.2)
GIVEN_EACH, GIVEN_TOTAL = Rate(250, 1.0), Rate(1000, 0.1)
LINES = 5
LINES_SECONDS = 60.0
TOKENS_SECONDS = 1.0

log = logging.getLogger("fedmpq.server")


class Malformed(ValueError):
    """An enrolment that says what cannot be."""


def budget_fault(budget: float) -> str | None:
    """What is wrong with a client's bits per weight; None: nothing."""
    if math.isfinite(budget) and 1 <= budget <= MAX_BITS:
        return None
    return f"a budget of {budget:g} bits per weight is outside 1..{MAX_BITS}"


class EnrolmentCalls:
    """The Enroll calls of all boards.

    Refused ones are counted by address and in all. Beyond the limit a call is answered without a look at what
    it says, unless its token is a good one: who guesses does not shut out who knows.
    """

    def __init__(self, store: Enrolment, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._failed = RateLimit(FAILED_EACH, FAILED_TOTAL, clock)
        self._given = RateLimit(GIVEN_EACH, GIVEN_TOTAL, clock)
        self._told = RefusalLog(clock)
        self._good: dict[bytes, str | None] = {}
        """Digests of the tokens that can be used, and for which name."""
        self._good_at = -math.inf

    async def enrol(self, request: pb.EnrollRequest, version: str, context: Context) -> pb.EnrollResponse:
        address = address_of(context.peer())
        may_fail = self._failed.take(address)
        if may_fail and not await self._is_good(request):
            await self._refuse_for_now(context, address, may_fail, "refused")
        if wait := self._given.take(address):
            if not may_fail:
                self._failed.give_back(address)
            await self._refuse_for_now(context, address, wait, "made")
        try:
            client_id, secret = await self._enrolled(request, version, context)
        except (Malformed, TokenRefused, NameTaken) as error:
            if not may_fail:
                self._given.give_back(address)
            await self._refuse(request, error, address, context)
        if not may_fail:
            self._failed.give_back(address)
        token_id = token_id_of(token_digest(request.token))
        what = "client enrolled"
        say(log, what, client=request.name, client_id=client_id, token=token_id, address=address)
        return pb.EnrollResponse(client_id=client_id, secret=secret)

    async def _enrolled(self, request: pb.EnrollRequest, version: str, context: Context) -> tuple[str, str]:
        if not NAME.fullmatch(request.name):
            raise Malformed("a client's name has letters, digits and '_.-', at most 64")
        if (fault := budget_fault(request.budget)) is not None:
            raise Malformed(fault)
        if not looks_like_token(request.token):
            raise UnknownToken("that is no enrolment token")
        secret = make_secret()
        client_id = await asyncio.to_thread(
            self._store.enrol,
            token_digest(request.token),
            request.name,
            request.budget,
            version,
            secret_hash(secret),
            certificate_name(context),
            time.time(),
        )
        return client_id, secret

    async def _is_good(self, request: pb.EnrollRequest) -> bool:
        """Whether the token can be used under this name; the store is asked once a second at most."""
        if self._clock() - self._good_at >= TOKENS_SECONDS:
            self._good_at = self._clock()
            tokens = await asyncio.to_thread(self._store.list_tokens)
            now = datetime.now(timezone.utc)
            self._good = {token.digest: token.client_name for token in tokens if token.state(now) == "valid"}
        digest = token_digest(request.token)
        return digest in self._good and self._good[digest] in (None, request.name)

    async def _refuse(
        self, request: pb.EnrollRequest, error: Exception, address: str, context: Context
    ) -> NoReturn:
        known = not isinstance(error, (Malformed, UnknownToken))
        token_id = token_id_of(token_digest(request.token)) if known else None
        name = request.name if NAME.fullmatch(request.name) else None
        self._told.refused(address, client=name, token=token_id, reason=str(error))
        code = grpc.StatusCode.UNAUTHENTICATED
        if isinstance(error, Malformed):
            code = grpc.StatusCode.INVALID_ARGUMENT
        elif isinstance(error, NameTaken):
            code = grpc.StatusCode.ALREADY_EXISTS
        await refuse(context, code, str(error))

    async def _refuse_for_now(self, context: Context, address: str, wait: float, what: str) -> NoReturn:
        self._told.refused(address, reason=f"too many were {what}")
        seconds = math.ceil(wait)
        context.set_trailing_metadata(((RETRY_AFTER, str(seconds)),))
        message = f"too many enrolments were {what} lately: retry in {seconds} s"
        await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)


class RefusalLog:
    """A line for each refusal, but no more than `LINES` in `LINES_SECONDS`; the rest are counted in one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = -math.inf
        self._lines = 0
        self._more = 0
        self._addresses: set[str] = set()

    def refused(self, address: str, **facts: str | None) -> None:
        if self._clock() - self._since >= LINES_SECONDS:
            self._sum_up()
            self._since = self._clock()
            asyncio.get_running_loop().call_later(LINES_SECONDS, self._sum_up)
        if self._lines < LINES:
            self._lines += 1
            say(log, "enrolment refused", level=logging.WARNING, **facts, address=address)
            return
        self._more += 1
        if len(self._addresses) < LINES:
            self._addresses.add(address)

    def _sum_up(self) -> None:
        if self._more:
            some = ",".join(sorted(self._addresses))
            level, seconds = logging.WARNING, round(LINES_SECONDS)
            say(
                log, "more enrolments refused", level=level, count=self._more, seconds=seconds, addresses=some
            )
        self._lines = self._more = 0
        self._addresses.clear()
