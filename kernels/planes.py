"""Codes to bit-planes and back, and counts on them.

Planes are u8[bits, ceil(m/8)]: plane i holds bit i of every code, weight j at bit j % 8 (least significant
first) of byte j // 8, padding bits 0. This is `np.packbits(bitorder="little")` of each bit.
"""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.call import Call, CheckedCall, Elements

MAX_BITS = 8


def pack_planes(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """planes[i, j // 8] bit (j % 8) = bit i of codes[j]; codes of any shape are read in C order."""
    bits = checked_bits(bits)
    codes = checked_bytes("codes", codes)
    planes = np.empty((bits, _plane_bytes(codes.size)), np.uint8)
    to = Elements(planes, planes.size)
    bad = Call("fedmpq_pack_planes", Elements(codes, codes.size), codes.size, bits, to)()
    _refuse_large_code(codes, bits, bad)
    return planes


def unpack_planes(planes: NDArray[np.uint8], m: int) -> NDArray[np.uint8]:
    """codes[j] = sum_i 2^i * (bit j % 8 of planes[i, j // 8]), for j in 0..m-1."""
    m = operator.index(m)
    planes = _checked_planes(planes)
    if m < 0 or planes.shape[1] != _plane_bytes(m):
        raise ValueError(f"planes of {m} weights have {_plane_bytes(m)} bytes each, not {planes.shape[1]}")
    codes = np.empty(m, np.uint8)
    source = Elements(planes, planes.size)
    bad = Call("fedmpq_unpack_planes", source, m, planes.shape[0], Elements(codes, m))()
    if bad >= 0:
        raise ValueError(f"plane {bad} has padding bits set after weight {m - 1}; they must be 0")
    return codes


def popcount_planes(planes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """counts[i] = number of set bits of plane i."""
    planes = _checked_planes(planes)
    counts = np.empty(planes.shape[0], np.int64)
    bits, plane_bytes = planes.shape
    source = Elements(planes, planes.size)
    CheckedCall("fedmpq_popcount_planes", source, plane_bytes, bits, Elements(counts, bits))()
    return counts


def magnitude_counts(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """counts[i] = number of codes c whose magnitude k has bit i set, i in 0..bits-2.

    With h = 2^(bits-1), k = c - h if c >= h, else h - 1 - c.
    """
    bits = checked_bits(bits)
    codes = checked_bytes("codes", codes)
    counts = np.empty(bits - 1, np.int64)
    source, to = Elements(codes, codes.size), Elements(counts, bits - 1)
    bad = Call("fedmpq_magnitude_counts", source, codes.size, bits, to)()
    _refuse_large_code(codes, bits, bad)
    return counts


def _plane_bytes(m: int) -> int:
    return (m + 7) // 8


def checked_bits(bits: int) -> int:
    bits = operator.index(bits)
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits is {bits}; a code has 1..{MAX_BITS} bits")
    return bits


def checked_bytes(name: str, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """`array` itself where it is contiguous, else a contiguous copy: the library knows no strides."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise TypeError(f"{name} must be a NumPy array of uint8, not {kind}")
    return np.ascontiguousarray(array)


def _checked_planes(planes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    planes = checked_bytes("planes", planes)
    if planes.ndim != 2:
        raise ValueError(f"planes must have shape (bits, ceil(m/8)), not {planes.shape}")
    checked_bits(planes.shape[0])
    return planes


def _refuse_large_code(codes: NDArray[np.uint8], bits: int, index: int) -> None:
    if index >= 0:
        code = codes.reshape(-1)[index]
        raise ValueError(f"code {code} at index {index} is too large: {bits} bits hold 0..{2**bits - 1}")
