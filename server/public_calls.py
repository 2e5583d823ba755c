"""A limit on the streams that anyone may open without an identity: health watches and reflection."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from fedmpq.server.refusals import Context, refuse

MAX_PUBLIC_STREAMS = 32
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_PUBLIC = "/grpc."


class PublicCallLimit(grpc.aio.ServerInterceptor):
    def __init__(self) -> None:
        self._open = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if not handler_call_details.method.startswith(_PUBLIC) or handler is None:
            return handler
        coders = handler.request_deserializer, handler.response_serializer
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(self._limited(handler.unary_stream), *coders)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._limited(handler.stream_stream), *coders)
        return handler

    def _limited(self, answer: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        async def limited(request: Any, context: Context) -> None:
            if self._open >= MAX_PUBLIC_STREAMS:
                await refuse(
                    context,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{MAX_PUBLIC_STREAMS} public streams are open, the most at a time: retry later",
                )
            self._open += 1
            try:
                answers = answer(request, context)
                if hasattr(answers, "__aiter__"):
                    async for one in answers:
                        await context.write(one)
                else:
                    await answers
            finally:
                self._open -= 1

        return limited  # type: ignore[return-value]
