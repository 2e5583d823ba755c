"""Where the buffers of a step lie: never two in one place at one time, and no more room than that takes."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.kernels.memory import Buffer
from fedmpq.training.arena import Arena, Layout, StepBuffer
from fedmpq.training.native_plan import with_spare

steps = st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=12)
sizes = st.lists(st.integers(0, 300), min_size=10, max_size=10)
few = st.frozensets(st.integers(0, 9))


def rounded(size: int) -> int:
    return -(-max(1, size) // 64) * 64


def laid_out(
    moments: list[list[int]], counts: list[int], spare: Collection[int] = ()
) -> tuple[Layout, dict[int, StepBuffer]]:
    """A step that uses these buffers at these moments."""
    layout = Layout()
    buffers = {
        index: (layout.spare_buffer if index in spare else layout.buffer)(counts[index], np.uint8)
        for index in sorted({*chain(*moments)})
    }
    for moment in moments:
        layout.use(*(buffers[index] for index in moment))
    return layout, buffers


@given(moments=steps, counts=sizes, spare=few)
def test_what_is_written_stays_until_its_last_use(
    moments: list[list[int]], counts: list[int], spare: frozenset[int]
) -> None:
    layout, buffers = laid_out(moments, counts, spare)
    arena = Arena()
    arena.grow(layout.place())
    layout.put_into(arena.block)
    assert all(buffer.placed for index, buffer in buffers.items() if index not in spare)
    moments = [[index for index in moment if buffers[index].placed] for moment in moments]
    expected: dict[int, bytes] = {}
    random = np.random.default_rng(0)
    for moment in moments:
        for index in moment:
            array = buffers[index].array
            assert len(array) == counts[index]
            assert expected.get(index, array.tobytes()) == array.tobytes()
        for index in moment:
            buffers[index].array[:] = random.integers(0, 256, counts[index])
            expected[index] = buffers[index].array.tobytes()
        for index in moment:
            assert buffers[index].array.tobytes() == expected[index]


@given(moments=steps, counts=sizes)
def test_the_block_is_no_larger_than_all_buffers_together(
    moments: list[list[int]], counts: list[int]
) -> None:
    layout, buffers = laid_out(moments, counts)
    assert layout.place() <= sum(rounded(counts[index]) for index in buffers)


@given(moments=steps, counts=sizes, spare=few)
def test_spare_buffers_take_no_more_than_a_sixth_on_top(
    moments: list[list[int]], counts: list[int], spare: frozenset[int]
) -> None:
    needed = [[index for index in moment if index not in spare] for moment in moments]
    without, _ = laid_out(needed, counts)
    least = 0
    for number in range(len(moments)):
        before, after = {*chain(*needed[: number + 1])}, {*chain(*needed[number:])}
        least = max(least, sum(rounded(counts[index]) for index in before & after))
    layout, _ = laid_out(moments, counts, spare)
    assert layout.place(little=0) <= max(without.place(), least * 7 // 6)
    assert layout.place(little=640) <= max(without.place(), with_spare(least, 640))


def test_the_last_spare_buffers_come_first() -> None:
    layout, buffers = laid_out(
        [[0, 1], [2], [3], [3], [2], [1, 0]], [3840, 640, 640, 640, *[0] * 6], {1, 2, 3}
    )
    assert layout.place(little=0) == 3840 + 640
    assert [buffers[index].placed for index in range(4)] == [True, False, False, True]


def test_little_is_given_to_spare_buffers_whatever_a_step_needs() -> None:
    moments, counts = [[0, 1], [2], [3], [3], [2], [1, 0]], [3840, 640, 640, 640, *[0] * 6]
    layout, buffers = laid_out(moments, counts, {1, 2, 3})
    assert layout.place(little=1280) == 3840 + 1280
    assert [buffers[index].placed for index in range(4)] == [True, False, True, True]


def test_a_spare_buffer_in_room_that_is_there_costs_nothing() -> None:
    layout, buffers = laid_out([[0], [1, 2], [1, 2], [3]], [1280, 640, 640, 1280, *[0] * 6], {1, 2})
    assert layout.place() == 1280
    assert all(buffer.placed for buffer in buffers.values())


def test_a_spare_buffer_without_a_place_has_no_array() -> None:
    layout, buffers = laid_out([[0, 1]], [64] * 10, {1})
    layout.put_into(np.zeros(layout.place(little=0), np.uint8))
    assert not buffers[1].placed
    assert not hasattr(buffers[1], "array")


def test_buffers_that_never_meet_share_a_place() -> None:
    layout, buffers = laid_out([[0, 1], [1, 2], [2, 3]], [640] * 10)
    assert layout.place() == 1280
    assert buffers[0].start == buffers[2].start != buffers[1].start == buffers[3].start


def test_parts_lie_one_behind_the_other_and_live_with_the_whole() -> None:
    layout = Layout()
    whole, other = layout.buffer(6, np.float32), layout.buffer(6, np.float32)
    first, second = whole.split(2)
    layout.use(first)
    layout.use(other)
    layout.use(second)
    layout.put_into(np.zeros(layout.place(), np.uint8))
    other.array[:] = -1
    first.array[:], second.array[:] = [1, 2, 3], [4, 5, 6]
    assert whole.array.tolist() == [1, 2, 3, 4, 5, 6]
    assert other.array.tolist() == [-1] * 6
    assert second.pointer.value == whole.array.ctypes.data + 12


def test_memory_from_elsewhere_may_be_used_beside() -> None:
    layout = Layout()
    layout.use(Buffer(1000, np.uint8), own := layout.buffer(10, np.uint8))
    assert layout.place() == 64
    assert own.start == 0


def test_an_arena_grows_and_never_shrinks() -> None:
    arena = Arena()
    for size, expected in ((100, 100), (50, 100), (200, 200)):
        arena.grow(size)
        assert arena.block.nbytes == expected
