"""A quantized layer in memory, and the packed form in which it is stored and sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model import grid, planes

Weights = dict[str, NDArray[np.float32]]
"""Full-precision weights by layer name."""
Side = dict[str, NDArray[np.float32]]
"""Side tensors (biases, BatchNorm, activation clips) by parameter name."""


@dataclass(frozen=True)
class PackedLayer:
    """`bits` planes of `ceil(m/8)` bytes and the step; the weight's shape is the graph's to know."""

    planes: NDArray[np.uint8]
    step: NDArray[np.float32]

    @property
    def bits(self) -> int:
        return len(self.planes)

    @property
    def nbytes(self) -> int:
        return self.planes.nbytes + self.step.nbytes

    def unpack(self, shape: tuple[int, ...]) -> QuantizedLayer:
        return QuantizedLayer(planes.unpack(self.planes, shape), self.bits, self.step)


@dataclass(frozen=True)
class QuantizedLayer:
    """Codes in the weight's shape, their bit-width, and the step: shape `()` or `(out_channels,)`."""

    codes: NDArray[np.uint8]
    bits: int
    step: NDArray[np.float32]

    @classmethod
    def from_weights(
        cls, weights: NDArray[np.float32], bits: int, rule: grid.StepRule, per_channel: bool
    ) -> QuantizedLayer:
        step = grid.STEP_RULES[rule](weights, bits, per_channel)
        return cls(grid.quantize(weights, step, bits), bits, step)

    def weights(self) -> NDArray[np.float32]:
        """The real weights `step * (code - zero_point)`."""
        return grid.dequantize(self.codes, self.step, self.bits)

    def integer_weights(self) -> NDArray[np.int8]:
        return grid.integer_weights(self.codes, self.bits)

    def integer_scale(self) -> NDArray[np.float32]:
        return grid.integer_scale(self.step, self.bits)

    def pack(self) -> PackedLayer:
        return PackedLayer(planes.pack(self.codes, self.bits), self.step)


def identity_layer(channels: int) -> QuantizedLayer:
    """A convolution of one pixel that gives each channel as it is: integer weights 63 of real value 1.

    A BatchNorm that reads codes is folded into one. With weights of 63 its integer bias is as fine as a 63rd
    of a code, and products of bytes still add up in pairs within 16 bits, which some CPUs need.
    """
    return QuantizedLayer(np.full((channels, 1, 1, 1), 63, np.uint8), 6, np.array(2 / 63, np.float32))


Layers = dict[str, QuantizedLayer]
"""The quantized layers of a model by name."""


def average_bits(bit_widths: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """`sum b_l m_l / sum m_l`: what a budget bounds."""
    return sum(b * m for b, m in zip(bit_widths, sizes, strict=True)) / sum(sizes)


def dequantize_all(layers: Mapping[str, QuantizedLayer]) -> Weights:
    return {name: layer.weights() for name, layer in layers.items()}
