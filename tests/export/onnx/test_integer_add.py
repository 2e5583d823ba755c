"""Ratios with which ONNX Runtime's integer addition is the program's, for every pair of codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from fedmpq.export.onnx.integer_add import Operand, Ratios, exact_ratios
from fedmpq.export.onnx.runtime import float_session
from fedmpq.model.activations import CodeFormat
from fedmpq.model.integer_program import AddCodes, QuantizeReal

ZERO = 128


def runtime_sum(
    a: NDArray[np.uint8], b: NDArray[np.uint8], ratios: Ratios, zero: int, zero_sum: int = 0
) -> NDArray[np.int32]:
    """By QLinearAdd of ONNX Runtime; `a` has zero point 128, `b` has `zero`, the sum `zero_sum`."""
    constants: dict[str, Any] = {"ra": ratios[0], "rb": ratios[1], "one": np.float32(1), "za": np.uint8(ZERO)}
    constants |= {"zb": np.uint8(zero), "zq": np.uint8(zero_sum), "b": b}
    nodes = [
        helper.make_node("DequantizeLinear", ["a", "ra", "za"], ["x"]),
        helper.make_node("Identity", ["b"], ["c"]),
        helper.make_node("DequantizeLinear", ["c", "rb", "zb"], ["y"]),
        helper.make_node("Add", ["x", "y"], ["s"]),
        helper.make_node("QuantizeLinear", ["s", "one", "zq"], ["q"]),
    ]
    graph = helper.make_graph(
        nodes,
        "add",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, a.shape)],
        [helper.make_tensor_value_info("q", TensorProto.UINT8, a.shape)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return np.asarray(float_session(model.SerializeToString())(a), np.int32)  # type: ignore[arg-type]


@pytest.mark.parametrize("signed", [False, True])
def test_found_ratios_add_as_the_program_does(signed: bool) -> None:
    random = np.random.default_rng(1)
    left = CodeFormat(np.float32(1), -127, 127)
    right = left if signed else CodeFormat(np.float32(1), 0, 15)
    zero = ZERO if signed else 0
    a, b = np.meshgrid(np.arange(left.low, 128), np.arange(right.low, right.high + 1), indexing="ij")
    found = 0
    for _ in range(6):
        scales = random.uniform(0.01, 0.1, 3).astype(np.float32)
        add = AddCodes("sum", "a", "b", *scales[:2])
        rounding = QuantizeReal("q", "sum", scales[2], 0, 15)
        ratios = exact_ratios(add, rounding, Operand(left, ZERO), Operand(right, zero), 0)
        if ratios is None:
            continue
        found += 1
        real = a.astype(np.float32) * add.left_scale + b.astype(np.float32) * add.right_scale
        wanted = np.clip(np.rint(real / rounding.scale), rounding.low, rounding.high)
        got = runtime_sum((a + ZERO).astype(np.uint8), (b + zero).astype(np.uint8), ratios, zero)
        np.testing.assert_array_equal(np.minimum(got, rounding.high), wanted)
    assert found >= 2


def test_sums_of_8_bits_are_in_integers_too() -> None:
    """Several of the 65,025 sums lie next to a tie; other ratios move them to the program's side of it."""
    random = np.random.default_rng(2)
    codes, found = CodeFormat(np.float32(1), -127, 127), 0
    a, b = np.meshgrid(np.arange(-127, 128), np.arange(-127, 128), indexing="ij")
    for _ in range(8):
        scales = random.uniform(0.02, 0.05, 3).astype(np.float32)
        add = AddCodes("sum", "a", "b", *scales[:2])
        rounding = QuantizeReal("q", "sum", scales[2], -127, 127)
        ratios = exact_ratios(add, rounding, Operand(codes, ZERO), Operand(codes, ZERO), ZERO)
        if ratios is None:
            continue
        found += 1
        real = a.astype(np.float32) * add.left_scale + b.astype(np.float32) * add.right_scale
        wanted = np.clip(np.rint(real / rounding.scale), -127, 127)
        stored = runtime_sum((a + ZERO).astype(np.uint8), (b + ZERO).astype(np.uint8), ratios, ZERO, ZERO)
        np.testing.assert_array_equal(np.maximum(stored - ZERO, -127), wanted)
    assert found >= 7


def test_ratios_that_an_arm_board_would_add_otherwise_with_are_refused() -> None:
    codes = CodeFormat(np.float32(1), -127, 127)
    add = AddCodes("sum", "a", "b", np.float32(1), np.float32(2.0**-15))
    rounding = QuantizeReal("q", "sum", np.float32(1), -127, 127)
    assert exact_ratios(add, rounding, Operand(codes, ZERO), Operand(codes, ZERO), ZERO) is None


def test_exact_ties_have_no_ratios() -> None:
    """Half a code and half a code: which way it rounds would hang on the order of operations."""
    codes = CodeFormat(np.float32(0.5), -127, 127)
    add = AddCodes("sum", "a", "b", np.float32(0.5), np.float32(0.5))
    operand, rounding = Operand(codes, ZERO), QuantizeReal("q", "sum", np.float32(1), -127, 127)
    assert exact_ratios(add, rounding, operand, operand, ZERO) is None


def test_operands_need_no_clamp_where_the_sums_clamp_hides_it() -> None:
    """Byte 0 means -128, which no code is: it must add like -127."""
    branch = CodeFormat(np.float32(0.0401), -127, 127)
    trunk = CodeFormat(np.float32(0.0307), 0, 15)
    add = AddCodes("sum", "a", "b", branch.scale, trunk.scale)
    unclamped, other = Operand(branch, ZERO, clamped=False), Operand(trunk, 0)
    assert (unclamped.codes[0], unclamped.meant[0]) == (-128, -127)
    rounded = QuantizeReal("q", "sum", np.float32(0.32), 0, 15)
    assert exact_ratios(add, rounded, unclamped, other, 0) is not None
    signed = QuantizeReal("q", "sum", np.float32(0.0433), -127, 127)
    assert exact_ratios(add, signed, unclamped, other, ZERO) is None
