"""How a call ends that is not answered."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Any, NoReturn

import grpc
import grpc.aio

from fedmpq.server.store.errors import StoreFailed

Context = grpc.aio.ServicerContext[Any, Any]
log = logging.getLogger("fedmpq.server")


async def refuse(context: Context, code: grpc.StatusCode, message: str) -> NoReturn:
    """End the call with this status; if its connection has gone meanwhile, just end it."""
    try:
        await context.abort(code, message)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort raises")


async def refuse_argument(context: Context, message: str) -> NoReturn:
    """The caller said something that cannot be."""
    await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, message)


class Answering:
    """While a call is answered; see `answering`."""

    __slots__ = ("_context", "_failed")

    def __init__(self, context: Context, failed: grpc.StatusCode) -> None:
        self._context, self._failed = context, failed

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A BaseError was refused, or its connection broke; what is no Exception ends the task.
        if isinstance(error, grpc.aio.BaseError) or not isinstance(error, Exception):
            return
        if isinstance(error, OSError):
            # The store tells of its failures once, however many calls meet them.
            if not isinstance(error, StoreFailed):
                log.error("the store failed", extra={"facts": {"error": str(error)}})
            message = f"the server cannot store anything now: retry later ({error})"
            await refuse(self._context, self._failed, message)
        log.error("a call failed", exc_info=error)
        await refuse(self._context, grpc.StatusCode.INTERNAL, "the server failed; its log says why")


def answering(context: Context, failed: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Answering:
    """Errors as status codes, a disk or database that fails as `failed`; those nobody foresaw are logged here
    and not explained to the caller.

    An object and no generator: every open stream has one, for as long as it is open.
    """
    return Answering(context, failed)
