"""Momentum of a layer's codes: none, float32, or 8 bit in blocks."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Flat = NDArray[np.float32]

BLOCK = 128


class Momentum(Protocol):
    """One buffer, zero at the start of a round."""

    def push(self, gradient: Flat) -> Flat:
        """`buffer <- mu * buffer + gradient`; the new buffer."""


class NoMomentum:
    """The gradient as it is."""

    def push(self, gradient: Flat) -> Flat:
        return gradient


class FloatMomentum:
    """Four bytes a weight."""

    def __init__(self, size: int, factor: float) -> None:
        self._buffer = np.zeros(size, np.float32)
        self._factor = np.float32(factor)

    def push(self, gradient: Flat) -> Flat:
        self._buffer *= self._factor
        self._buffer += gradient
        return self._buffer


class BlockMomentum:
    """One byte a weight and a float32 scale per block: `value = scale * q`, `scale = max|block| / 127`."""

    def __init__(self, size: int, factor: float) -> None:
        blocks = -(-size // BLOCK)
        self._size = size
        self._codes = np.zeros((blocks, BLOCK), np.int8)
        self._scales = np.zeros((blocks, 1), np.float32)
        self._factor = np.float32(factor)

    def push(self, gradient: Flat) -> Flat:
        new = self._codes.astype(np.float32) * (self._scales * self._factor)
        new.reshape(-1)[: self._size] += gradient
        self._scales = np.abs(new).max(axis=1, keepdims=True) / np.float32(127)
        safe = np.where(self._scales > 0, self._scales, np.float32(1))
        # A scale among the denormals is so coarse that the quotient can pass 127.
        self._codes = np.clip(np.rint(new / safe), -127, 127).astype(np.int8)
        return new.reshape(-1)[: self._size]


def make_momentum(size: int, factor: float, bits: int) -> Momentum:
    """The buffer for `bits` of 0, 8 or 32."""
    if bits == 0 or factor == 0:
        return NoMomentum()
    return FloatMomentum(size, factor) if bits == 32 else BlockMomentum(size, factor)
