"""FedPAQ's uploads (Reisizadeh et al. 2020): an unbiased stochastic quantizer with one max norm per layer.

With ``v`` bits a weight, one of them the sign, there are ``s = 2^(v-1) - 1`` levels: for ``r = s * x /
max|x|`` and ``U`` uniform on [0, 1), ``q = floor(r) + [U < r - floor(r)]`` and ``x' = max|x| * q / s``, so
``E[x'] = x``. One bit leaves no level beside the sign (``s = 0``); the unbiased quantizer on the two values
left is ``x' = +max|x|`` with probability ``(1 + x / max|x|) / 2``, else ``-max|x|``. That is what ``v = 1``
does here.

Stored form: a float32 norm, then ``v`` bits a weight, lowest bit first, with no gaps between weights; the
code is ``q + s`` for ``v > 1`` and 1 for plus, 0 for minus, for ``v = 1``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.compression import PayloadError, UpdateError, flat_uniforms, flat_update

MIN_BITS = 1
MAX_BITS = 8
_NORM_BYTES = 4


@dataclass(frozen=True)
class FedPAQPayload:
    """One encoded tensor. The receiver knows shape and bits already; norm and data are what is sent."""

    shape: tuple[int, ...]
    bits: int
    norm: np.float32
    data: bytes

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: the norm and the packed codes."""
        return _NORM_BYTES + len(self.data)


def encode(delta: NDArray[np.float32], bits: int, uniforms: NDArray[np.floating]) -> FedPAQPayload:
    """Quantize an update to ``bits`` a weight, one uniform in [0, 1) per weight."""
    _require_bits(bits, UpdateError)
    update = flat_update(delta)
    chance = flat_uniforms(uniforms, update.size)
    norm = np.float32(np.abs(update).max())
    return FedPAQPayload(delta.shape, bits, norm, _pack(_stochastic_codes(update, norm, bits, chance), bits))


def decode(payload: FedPAQPayload) -> NDArray[np.float32]:
    """The update that the payload stands for."""
    _require_bits(payload.bits, PayloadError)
    count = math.prod(payload.shape)
    needed = -(-count * payload.bits // 8)
    if len(payload.data) != needed:
        raise PayloadError(
            f"{len(payload.data)} bytes of codes; shape {payload.shape} at {payload.bits} bits needs {needed}"
        )
    if not (np.isfinite(payload.norm) and payload.norm >= 0):
        raise PayloadError(f"the norm is {payload.norm}; it must be finite and not negative")
    codes = _unpack(payload.data, payload.bits, count).astype(np.float64)
    levels = _levels(payload.bits)
    signed = codes - levels if levels else 2 * codes - 1
    decoded: NDArray[np.float32] = (signed * np.float64(payload.norm) / max(levels, 1)).astype(np.float32)
    return decoded.reshape(payload.shape)


def _levels(bits: int) -> int:
    return int(2 ** (bits - 1) - 1)


def _stochastic_codes(
    update: NDArray[np.float64], norm: np.float32, bits: int, chance: NDArray[np.float64]
) -> NDArray[np.uint8]:
    # An update of zeros may be divided by anything: the norm that multiplies its codes is 0.
    scale = np.float64(norm) if norm > 0 else np.float64(1)
    levels = _levels(bits)
    # Multiplying first is exact in float64, so a weight that lies on a level stays there.
    target = update * levels / scale if levels else (update / scale + 1) / 2
    low = np.floor(target)
    codes: NDArray[np.uint8] = (low + (chance < target - low) + levels).astype(np.uint8)
    return codes


def _pack(codes: NDArray[np.uint8], bits: int) -> bytes:
    each = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(each, bitorder="little").tobytes()


def _unpack(data: bytes, bits: int, count: int) -> NDArray[np.uint8]:
    stream = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits, bitorder="little")
    return np.packbits(stream.reshape(count, bits), axis=1, bitorder="little")[:, 0]


def _require_bits(bits: int, error: type[ValueError]) -> None:
    if not MIN_BITS <= bits <= MAX_BITS or bits != int(bits):
        raise error(f"bits is {bits}; FedPAQ stores a whole number of bits a weight, {MIN_BITS}..{MAX_BITS}")
