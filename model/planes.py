"""Bit-planes: how codes are stored and sent.

Plane `i` holds bit `i` of every code, eight to a byte, weight `j` in byte `j // 8` at bit `j % 8`; the
padding bits of the last byte are zero. A layer of `m` weights at `bits` bits is `bits` planes of `ceil(m/8)`
bytes each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq import kernels


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Codes of any shape to planes `(bits, ceil(m/8))`; a code of `2^bits` or more is an error."""
    return kernels.pack_planes(codes.reshape(-1), bits)


def unpack(planes: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Planes back to codes of `shape`; planes of another length, or with padding bits set, are an error."""
    return kernels.unpack_planes(planes, int(np.prod(shape))).reshape(shape)


def nbytes(bits: int, weights: int) -> int:
    """Bytes of a layer of `weights` weights at `bits` bits."""
    return bits * ((weights + 7) // 8)
