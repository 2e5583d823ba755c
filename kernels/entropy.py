"""Codes as an entropy code and back; `include/fedmpq/kernels.h` states the format."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.call import Call, CheckedCall, Elements
from fedmpq.kernels.planes import checked_bits, checked_bytes


def encode_codes(codes: NDArray[np.uint8], bits: int, room: int) -> bytes | None:
    """The code of `codes`, which are read in C order; None if it does not fit `room` bytes."""
    bits = checked_bits(bits)
    codes = checked_bytes("codes", codes)
    coded = np.empty(room, np.uint8)
    target = Elements(coded, room)
    length = CheckedCall("fedmpq_encode_codes", Elements(codes, codes.size), codes.size, bits, target, room)()
    return coded[:length].tobytes() if length else None


def decode_codes(coded: bytes, count: int, bits: int) -> NDArray[np.uint8]:
    """So many codes; ValueError if these bytes are not the code of so many."""
    bits = checked_bits(bits)
    source, codes = np.frombuffer(coded, np.uint8), np.empty(count, np.uint8)
    given = Elements(source, source.size)
    status = Call("fedmpq_decode_codes", given, source.size, count, bits, Elements(codes, count))()
    if status < 0:
        raise ValueError(f"{len(coded)} bytes are not the code of {count} codes of {bits} bits")
    return codes
