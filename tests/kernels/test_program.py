"""Programs: their calls run in order with what arguments are by then, and each refuses with its own error."""

from __future__ import annotations

from ctypes import c_float, c_uint32
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call, CheckedCall, Elements, KernelError
from fedmpq.kernels.library import library
from fedmpq.kernels.memory import Buffer
from fedmpq.kernels.program import Program, in_one_go
from fedmpq.kernels.tensors import Conv, StoredCodes, WeightCodes

NOT_VALID = -4


def adding(target: NDArray[np.float32], clipped: list[float], below: bool = False) -> Call:
    """A kernel whose result tells when it ran."""
    return bound.clip_gradient(np.array(clipped), below, target)


def weighing(codes: NDArray[np.uint8], bits: c_uint32, out: NDArray[np.int32]) -> Call:
    """A product whose results are the weights that codes of so many bits stand for."""
    one = StoredCodes(np.ones(1, np.uint8), False, 0)
    conv = Conv.over(1, (1, 1, 1), out_channels=len(codes))
    return bound.conv_forward(conv, one, WeightCodes(codes, bits), 1, out, None)


def program(*calls: Call) -> Program:
    return Program(calls)  # type: ignore[arg-type]


def test_calls_run_in_their_order() -> None:
    first = np.zeros(1, np.float32)
    weights, bits, out = np.arange(4, dtype=np.uint8), c_uint32(3), np.zeros(4, np.int32)
    run = program(
        adding(first, [1.0, 5.0]),
        adding(first, [3.0, 1.0], below=True),
        weighing(weights, bits, out),
    )
    run()
    assert first[0] == 2.0
    assert out.tolist() == [-7, -5, -3, -1]
    bits.value, weights[0] = 2, 3
    run()
    assert out.tolist() == [3, -1, 1, 3]


def test_numbers_and_places_are_read_when_a_program_runs() -> None:
    left, number, out, states = (
        Buffer(4, np.uint8),
        c_float(2.0),
        np.zeros(4, np.uint8),
        np.zeros(1, np.uint8),
    )
    codes: Any = StoredCodes(left, False, 0)
    run = program(bound.add(codes, number, codes, 0.0, 1, 4, 1.0, 0, 255, False, 1, out, states))
    for factor, values in ((2, [1, 2, 3, 4]), (3, [9, 8, 7, 6])):
        number.value = factor
        left.put(np.array(values, np.uint8))
        run()
        assert out.tolist() == [factor * value for value in values]


def test_the_first_call_that_refuses_ends_a_program_with_its_own_error() -> None:
    before, after = np.zeros(1, np.float32), np.zeros(1, np.float32)
    bits = c_uint32(9)
    refusing = weighing(np.zeros(4, np.uint8), bits, np.zeros(4, np.int32))
    run = program(adding(before, [1.0, 0.0]), refusing, adding(after, [1.0, 0.0]))
    with pytest.raises(
        KernelError, match=r"fedmpq_conv_forward\(.*, 4 elements, 9, 1, 4 elements, None\) refuses"
    ):
        run()
    assert (before[0], after[0]) == (1.0, 0.0)
    bits.value = 4
    run()
    assert after[0] == 1.0


@pytest.mark.parametrize(
    ("subject", "complaint"),
    [
        ("the scale of 'x'", "^the scale of 'x' is not finite$"),
        ("", "fedmpq_add met a number that is not finite"),
    ],
)
def test_what_is_not_finite_is_named_by_who_bound_the_call(subject: str, complaint: str) -> None:
    codes, out = StoredCodes(np.zeros(4, np.uint8), False, 0), np.zeros(4, np.uint8)
    call = bound.add(codes, 3e38, codes, 0.0, 1, 4, 1e-3, 0, 255, False, 1, out, np.zeros(1, np.uint8))
    call.subject = subject
    for run in (call, program(call)):
        with pytest.raises(FloatingPointError, match=complaint):
            run()


def test_a_null_pointer_stays_one() -> None:
    conv = Conv.over(1, (1, 2, 2))
    codes, acc = StoredCodes(np.array([1, 2, 3, 4], np.uint8), False, 0), np.zeros(4, np.int32)
    program(bound.conv_forward(conv, codes, np.full(1, 5, np.int8), 1, acc, None))()
    assert acc.tolist() == [5, 10, 15, 20]


def test_what_is_no_function_of_a_program_is_refused() -> None:
    with pytest.raises(ValueError, match="fedmpq_force_bit_serial cannot be part of a program"):
        program(CheckedCall("fedmpq_force_bit_serial", -1))
    assert library.fedmpq_function(b"fedmpq_run") == -1


def test_neighbouring_calls_run_in_one_go_and_other_actions_between_them() -> None:
    target, seen = np.zeros(1, np.float32), list[float]()

    class Watched(CheckedCall):
        def __call__(self) -> Any:
            seen.append(-1.0)
            return super().__call__()

    def look() -> None:
        seen.append(float(target[0]))

    watched = Watched("fedmpq_clip_gradient", Elements(np.array([7.0, 0.0]), 2), 0, Elements(target, 1))
    calls = [adding(target, [float(number), 0.0]) for number in (1, 2, 3)]
    arranged = in_one_go([look, calls[0], calls[1], look, watched, look, calls[2]])
    assert [isinstance(each, Program) for each in arranged] == [False, True, False, False, False, True]
    for act in arranged:
        act()
    assert seen == [0.0, 2.0, -1.0, 7.0]
    assert target[0] == 3.0


def test_time_is_taken_by_call() -> None:
    count = 2**14
    long = weighing(np.zeros(count, np.uint8), c_uint32(4), np.zeros(count, np.int32))
    run = program(adding(np.zeros(1, np.float32), [0.0, 0.0]), long)
    seconds = run.timed()
    run()
    once = seconds.copy()
    assert 0 <= once[0] < once[1]
    run()
    assert seconds[1] > once[1]


def raw(
    functions: Any, addresses: Any, arguments: int | None = None, count: int | None = None
) -> tuple[int, int]:
    """What `fedmpq_run` says of a list of its own making, and where it stopped."""
    stopped = np.full(1, 99, np.int32)
    functions, addresses = np.array(functions, np.int32), np.array(addresses, np.int64)
    status = library.fedmpq_run(
        functions.ctypes.data,
        len(functions) if count is None else count,
        addresses.ctypes.data,
        len(addresses) if arguments is None else arguments,
        stopped.ctypes.data,
        None,
    )
    return status, int(stopped[0])


def test_a_program_that_cannot_be_is_not_run() -> None:
    number, target = library.fedmpq_function(b"fedmpq_clip_gradient"), np.zeros(1, np.float32)
    call = adding(target, [4.0, 0.0])
    places = [Program([call])._addresses[i] for i in range(3)]  # type: ignore[list-item]
    assert raw([number], places) == (0, -1)
    assert target[0] == 4.0
    target[0] = 0.0
    for wrong in (
        raw([-1], places),
        raw([10**6], places),
        raw([number], places[:2]),
        raw([number, number], places),
        raw([number], [places[0], 0, places[2]]),
        raw([number], places, count=-1),
        raw([number], places, arguments=-1),
    ):
        assert wrong == (NOT_VALID, -1)
    assert library.fedmpq_run(None, 0, None, 0, None, None) == NOT_VALID
    assert target[0] == 0.0
