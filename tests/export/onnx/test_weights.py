"""Weights as bit-planes and outliers: every code comes back, skewed ones in fewer bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from fedmpq.export.onnx.runtime import float_session
from fedmpq.export.onnx.weights import gaps, inner_codes, unpacked_weights
from fedmpq.export.onnx.writer import OnnxWriter
from fedmpq.export.operations import Sums
from fedmpq.model.grid import integer_weights
from fedmpq.model.ops import Linear

WIDE_ZERO = 128


def layer(name: str, codes: NDArray[np.uint8], bits: int) -> Sums:
    op = Linear(codes.shape[1], codes.shape[0], bias=True)
    return Sums(name, "x", op, codes, bits, np.zeros(len(codes), np.int32))


def loaded(layers: Sequence[Sums]) -> tuple[dict[str, NDArray[np.int64]], int]:
    """Integer weights of each layer as ONNX Runtime unpacks them, and the size of the file."""
    writer = OnnxWriter()
    rows = unpacked_weights(writer, layers)
    values = [writer.node("Cast", [rows[sums.layer]], to=TensorProto.FLOAT) for sums in layers]
    writer.node("Concat", [*values, "x"], axis=1, output="y")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, None]) for name in "xy")
    content = writer.model("weights", [x], [y], {})[0].SerializeToString()
    flat = float_session(content)(np.zeros((1, 0), np.float32))[0].astype(np.int64)
    ends = np.cumsum([sums.codes.size for sums in layers])
    parts = np.split(flat, ends[:-1])
    zeros = [WIDE_ZERO if sums.bits > 6 else 0 for sums in layers]
    return {s.layer: part - zero for s, part, zero in zip(layers, parts, zeros, strict=True)}, len(content)


def skewed(bits: int, shape: tuple[int, int], seed: int, spread: float) -> NDArray[np.uint8]:
    """Codes about the middle of their range."""
    normal = np.random.default_rng(seed).normal(0, spread, shape)
    middle = (2**bits - 1) / 2
    least = 1 if bits == 8 else 0
    codes: NDArray[np.uint8] = np.clip(np.rint(middle + normal * middle), least, 2**bits - 1).astype(np.uint8)
    return codes


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("spread", [0.15, 0.3, 0.36, 5.0])
def test_every_weight_comes_back(bits: int, spread: float) -> None:
    layers = [layer(str(i), skewed(bits, (7, 101 + 911 * i), i, spread), bits) for i in range(3)]
    found, _ = loaded(layers)
    for sums in layers:
        expected = integer_weights(sums.codes, sums.bits).ravel()
        np.testing.assert_array_equal(found[sums.layer], expected)


def test_a_mix_of_widths_comes_back() -> None:
    layers = [layer(str(i), skewed(1 + i % 8, (5, 997), i, 0.2), 1 + i % 8) for i in range(16)]
    found, _ = loaded(layers)
    for sums in layers:
        np.testing.assert_array_equal(found[sums.layer], integer_weights(sums.codes, sums.bits).ravel())


def test_outliers_take_fewer_bytes_than_a_plane_and_flat_codes_take_their_bits() -> None:
    bits, shape = 4, (64, 2000)
    bare = bits * shape[0] * shape[1] / 8
    # Some 1 % of outliers, whose distances take 8 bits, and some 15 %, whose distances take 4.
    for spread, most in ((0.2, 0.8), (0.35, 0.93)):
        _, size = loaded([layer("a", skewed(bits, shape, 0, spread), bits)])
        assert size < most * bare
    _, flat = loaded([layer("a", skewed(bits, shape, 0, 5.0), bits)])
    assert bare < flat < bare + 600


@settings(max_examples=50)
@given(seed=st.integers(0, 1000), share=st.floats(0, 0.2), skip=st.sampled_from([15, 255]))
def test_gaps_say_where_outliers_are(seed: int, share: float, skip: int) -> None:
    outliers = np.random.default_rng(seed).random(3000) < share
    place, places = -1, []
    for gap in gaps(outliers, skip).tolist():
        place += gap + (gap < skip)
        if gap < skip:
            places.append(place)
    assert places == np.flatnonzero(outliers).tolist()


def test_inner_codes_are_those_of_one_bit_less() -> None:
    codes = np.arange(16, dtype=np.uint8)
    inner, outliers = inner_codes(codes, 4)
    weights, narrow = integer_weights(codes, 4).astype(int), integer_weights(inner, 3).astype(int)
    np.testing.assert_array_equal(weights, narrow + np.sign(narrow) * 8 * outliers)
    assert np.abs(weights[~outliers]).max() <= 7
