"""Weights in a file: packed bit-planes, `b` bits each or fewer, and the nodes that unpack them.

Weights of one bit-width lie in one constant. Of a layer whose few greatest weights set its step, most codes
lie in the inner half of the range: those are codes of `b - 1` bits. Where that is shorter, all weights of the
constant are stored so, and the outliers, `2^(b-1)` further from 0, by the number of weights between each and
the one before, in 4 or 8 bits each; 15 or 255 stands for so many weights without an outlier behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from fedmpq.export.onnx.writer import OnnxWriter
from fedmpq.export.operations import Sums
from fedmpq.model import planes
from fedmpq.model.grid import FAST_BITS, MAX_BITS

# Weights unpacked together: loading takes some ten bytes for each of them.
_MOST_TOGETHER = 2**21
_GAP_BITS = (4, 8)
# About what the nodes that put outliers back take.
_NODES_OF_OUTLIERS = 300


def weight_constants(bits: int) -> tuple[NDArray[np.uint8], np.int32, type[np.int8 | np.uint8]]:
    """`(place, offset, type)`: the stored weight is `offset + sum place_i * bit_i`, in that type.

    It is the integer weight, `2*code - (2^bits - 1)`, as `int8` up to 6 bits. At 7, and at 8 bits where the
    integer weight is `code - 128`, it is `uint8` with 128 added.
    """
    gain = 1 if bits == MAX_BITS else 2
    place = np.array([[gain << i for i in range(bits)]], np.uint8)
    if bits <= FAST_BITS:
        return place, np.int32(1 - 2**bits), np.int8
    return place, np.int32(0 if bits == MAX_BITS else 1), np.uint8


def inner_codes(codes: NDArray[np.uint8], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Codes of one bit less, and which of them are outliers: the two upper bits were the same."""
    upper, second = codes >> (bits - 1), codes >> (bits - 2) & 1
    lower = codes & (2 ** (bits - 2) - 1)
    return upper << (bits - 2) | lower, upper == second


def gaps(outliers: NDArray[np.bool_], skip: int) -> NDArray[np.uint8]:
    """The number of others before each outlier, below `skip`; `skip` for so many and no outlier yet."""
    (places,) = np.nonzero(outliers)
    between = np.diff(places, prepend=-1) - 1
    skips = between // skip
    found = np.full(len(places) + int(skips.sum()), skip, np.uint8)
    found[np.cumsum(skips + 1) - 1] = between % skip
    return found


def unpacked_weights(writer: OnnxWriter, sums: Sequence[Sums]) -> dict[str, str]:
    """The values that hold the integer weights of each layer, as a row, by the layer's name."""
    return {name: row for group in _groups(sums) for name, row in _rows(writer, group)}


def _groups(sums: Sequence[Sums]) -> list[list[Sums]]:
    """Layers of one bit-width together, as many as may be unpacked at once."""
    groups: list[list[Sums]] = []
    for each in sorted(sums, key=lambda one: one.bits):
        last = groups[-1] if groups else []
        if last and last[0].bits == each.bits and _size([*last, each]) <= _MOST_TOGETHER:
            last.append(each)
        else:
            groups.append([each])
    return groups


def _size(sums: Sequence[Sums]) -> int:
    return sum(each.codes.size for each in sums)


def _rows(writer: OnnxWriter, group: Sequence[Sums]) -> Iterator[tuple[str, str]]:
    bits, sizes = group[0].bits, [sums.codes.size for sums in group]
    codes = np.concatenate([sums.codes.ravel() for sums in group])
    kind = weight_constants(bits)[2]
    whole = _integers(writer, codes, bits)
    row = writer.node("Cast", [whole], to=TensorProto.INT8 if kind is np.int8 else TensorProto.UINT8)
    spare = -sum(sizes) % 8
    parts = writer.parts(row, [*sizes, spare] if spare else sizes, axis=1)
    yield from zip([sums.layer for sums in group], parts, strict=False)


def _integers(writer: OnnxWriter, codes: NDArray[np.uint8], bits: int) -> str:
    """All weights as int32, (1, N); N is rounded up to whole bytes of bits."""
    if 2 <= bits <= FAST_BITS:
        inner, outliers = inner_codes(codes, bits)
        found = {width: gaps(outliers, 2**width - 1) for width in _GAP_BITS}
        width = min(found, key=lambda each: each * len(found[each]))
        if width * len(found[width]) + 8 * _NODES_OF_OUTLIERS < len(codes):
            narrow = _from_planes(writer, inner, bits - 1)
            return _with_outliers(writer, narrow, found[width], width, 2 ** (bits - 1))
    return _from_planes(writer, codes, bits)


def _from_planes(writer: OnnxWriter, codes: NDArray[np.uint8], bits: int) -> str:
    """Bytes up to the sums, so that loading takes little memory."""
    node, constant = writer.node, writer.constant
    place, offset, _ = weight_constants(bits)
    packed = constant(planes.pack(codes, bits)[:, :, None])
    shifted = node("BitShift", [packed, constant(np.arange(8, dtype=np.uint8))], direction="RIGHT")
    single = node("BitwiseAnd", [shifted, constant(np.ones(1, np.uint8))])
    by_plane = node("Reshape", [single, constant(np.array([0, -1], np.int64))])
    sums = node("MatMulInteger", [constant(place), by_plane])
    return node("Add", [sums, constant(offset)]) if offset else sums


def _with_outliers(
    writer: OnnxWriter, inner: str, distances: NDArray[np.uint8], width: int, further: int
) -> str:
    """The weights with outliers put `further` from 0, where they keep their sign."""
    node, constant = writer.node, writer.constant
    stored = writer.nibbles(distances[None, :]) if width == 4 else constant(distances[None, :])
    steps = node("Cast", [stored], to=TensorProto.INT32)
    real = node("Cast", [node("Less", [steps, constant(np.int32(2**width - 1))])], to=TensorProto.INT32)
    ends = node("CumSum", [node("Add", [steps, real]), constant(np.int32(1))])
    places = node("Sub", [ends, constant(np.int32(1))])
    found = node("GatherElements", [inner, places], axis=1)
    signs = node("Mul", [node("Sign", [found]), real])
    moved = node("Add", [found, node("Mul", [signs, constant(np.int32(further))])])
    return node("ScatterElements", [inner, places, moved], axis=1)
