"""Questions to something slow, such as a database, answered together when they come together.

While one batch is being answered, whatever is asked gathers; it is the next batch. A question that comes
alone is answered at once, and of a thousand that come at a time each costs a share of few round trips.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")

MOST_AT_ONCE = 256
"""Questions in a batch: who came first does not wait for thousands."""


class Batched(Generic[Question, Answer]):
    """Lives in the event loop. `answer` gives one answer for each question, in their order; an answer that is
    an exception is raised to who asked, and one that `answer` raises to all of the batch."""

    def __init__(
        self,
        answer: Callable[[Sequence[Question]], Awaitable[Sequence[Answer | Exception]]],
        most: int = MOST_AT_ONCE,
    ) -> None:
        self._answer = answer
        self._most = most
        self._waiting: deque[tuple[Question, asyncio.Future[Answer]]] = deque()
        self._answering: asyncio.Task[None] | None = None

    async def ask(self, question: Question) -> Answer:
        """The answer. A caller that goes away leaves its question, which is answered all the same."""
        wanted: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, wanted))
        if self._answering is None:
            self._answering = asyncio.ensure_future(self._answer_all())
        return await wanted

    async def _answer_all(self) -> None:
        try:
            while self._waiting:
                count = min(len(self._waiting), self._most)
                await self._answer_batch([self._waiting.popleft() for _ in range(count)])
        finally:
            self._answering = None

    async def _answer_batch(self, batch: Sequence[tuple[Question, asyncio.Future[Answer]]]) -> None:
        try:
            answers: Sequence[Answer | Exception] = await self._answer([question for question, _ in batch])
        except Exception as error:
            answers = [error] * len(batch)
        for (_, wanted), answer in zip(batch, answers, strict=True):
            if wanted.done():
                continue
            if isinstance(answer, Exception):
                wanted.set_exception(answer)
            else:
                wanted.set_result(answer)
