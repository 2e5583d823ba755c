"""The bell that wakes all who wait for a change."""

from __future__ import annotations

import asyncio

import pytest

from fedmpq.server.connections import Bell


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_who_is_cancelled_as_the_bell_rings_does_not_go_on(turns: int) -> None:
    async def scenario() -> None:
        bell, went_on = Bell(), False

        async def wait() -> None:
            nonlocal went_on
            await bell.wait(0, 60.0)
            went_on = True

        waiting = asyncio.create_task(wait())
        for _ in range(4):
            await asyncio.sleep(0)
        bell.ring()
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() == cancelled == (not went_on)

    asyncio.run(scenario())


def test_a_wait_ends_with_the_bell_or_with_its_time() -> None:
    async def scenario() -> None:
        bell = Bell()
        await bell.wait(0, 0.01)
        assert bell.count == 0
        waiting = asyncio.create_task(bell.wait(0))
        await asyncio.sleep(0)
        bell.ring()
        await asyncio.wait_for(waiting, 10)
        # It has rung since, so there is nothing to wait for.
        await asyncio.wait_for(bell.wait(0), 10)

    asyncio.run(scenario())
