"""How a call ends that is not answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def answering(
    context: Context, failed: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
) -> AsyncIterator[None]:
    """Errors as status codes, a disk or database that fails as `failed`; those nobody foresaw are logged here
    and not explained to the caller."""
    try:
        yield
    except grpc.aio.BaseError:
        # Refused, or its connection broke.
        raise
    except OSError as error:
        # The store tells of its failures once, however many calls meet them.
        if not isinstance(error, StoreFailed):
            log.error("the store failed", extra={"facts": {"error": str(error)}})
        await refuse(context, failed, f"the server cannot store anything now: retry later ({error})")
    except Exception:
        log.exception("a call failed")
        await refuse(context, grpc.StatusCode.INTERNAL, "the server failed; its log says why")
