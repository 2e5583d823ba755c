import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.server.batched import Batched
from fedmpq.server.pace import MOST_REST, Pace


class Doubling:
    """Twice the number, an error for the number 13; holds each batch until it is let go."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = asyncio.Event()

    async def __call__(self, numbers: Sequence[int]) -> list[int | Exception]:
        self.batches.append(list(numbers))
        await self.go.wait()
        if 99 in numbers:
            raise OSError("the disk is full")
        return [ValueError("13") if number == 13 else 2 * number for number in numbers]


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(1, 9))
def test_everybody_gets_the_answer_to_its_own_question(numbers: list[int], most: int) -> None:
    async def scenario() -> None:
        double = Doubling()
        batched = Batched(double, most)
        asked = [asyncio.ensure_future(batched.ask(number)) for number in numbers]
        double.go.set()
        assert await asyncio.gather(*asked) == [2 * number for number in numbers]
        assert [number for batch in double.batches for number in batch] == numbers
        assert all(len(batch) <= most for batch in double.batches)

    asyncio.run(scenario())


def test_what_comes_while_one_is_answered_is_answered_together() -> None:
    async def scenario() -> None:
        double = Doubling()
        batched = Batched(double)
        asked = [asyncio.ensure_future(batched.ask(1))]
        await asyncio.sleep(0)
        while not double.batches:
            await asyncio.sleep(0)
        asked += [asyncio.ensure_future(batched.ask(number)) for number in (2, 3, 4)]
        await asyncio.sleep(0)
        double.go.set()
        assert await asyncio.gather(*asked) == [2, 4, 6, 8]
        assert double.batches == [[1], [2, 3, 4]]
        # And again, after a time without any.
        assert await batched.ask(5) == 10

    asyncio.run(scenario())


def test_errors_go_to_whom_they_concern_and_leaving_holds_up_nobody() -> None:
    async def scenario() -> None:
        double = Doubling()
        batched = Batched(double, most=3)
        asked = [asyncio.ensure_future(batched.ask(number)) for number in (1, 13, 2, 99, 3, 4, 5)]
        await asyncio.sleep(0)
        asked[2].cancel()
        double.go.set()
        first, bad, gone, *failed, last = await asyncio.gather(*asked, return_exceptions=True)
        assert (first, last) == (2, 10)
        assert isinstance(bad, ValueError)
        assert isinstance(gone, asyncio.CancelledError)
        assert [str(error) for error in failed] == ["the disk is full"] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize(("look", "rest"), [(0.0, 0.0), (0.001, 0.009), (10.0, MOST_REST)])
def test_a_rest_follows_a_look(look: float, rest: float) -> None:
    now = [5.0]
    pace = Pace(lambda: now[0])
    assert pace.seconds == 0
    pace.begin()
    now[0] += look
    pace.end()
    now[0] += 1
    assert pace.seconds == pytest.approx(rest)
