"""Layers as nodes: weights unpacked from bit-planes, then one integer convolution or product each.

ONNX Runtime folds whatever depends on constants only when it loads a file. Nothing is left to unpack at run
time; what remains of a layer is one QLinearConv, of the last one QGemm. The scales of what a layer reads and
gives are 1 and that of its weights is the multiplier, so what the runtime multiplies its sums by is the
multiplier to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto

from fedmpq.export.onnx.pixel_groups import PIXELS, PixelGroups
from fedmpq.export.onnx.weights import unpacked_weights
from fedmpq.export.onnx.writer import OnnxWriter
from fedmpq.export.operations import RealLayer, RoundedLayer, Sums
from fedmpq.model.graph import Conv2d
from fedmpq.model.grid import FAST_BITS

UNIT = np.float32(1)
_WIDE_ZERO = np.uint8(128)
_FROM_CHANNELS_LAST, _TO_CHANNELS_LAST = (0, 3, 1, 2), (0, 2, 3, 1)


class LayerWriter:
    """Writes layers whose weights, biases and multipliers are parts of a few constants."""

    def __init__(self, writer: OnnxWriter, layers: Sequence[RoundedLayer | RealLayer]) -> None:
        self.writer = writer
        sums = [layer.sums for layer in layers]
        self.weights = unpacked_weights(writer, sums)
        sizes, names = [len(each.bias) for each in sums], [each.layer for each in sums]
        self.biases = dict(zip(names, writer.parts(self._all_biases(sums), sizes), strict=True))
        factors = [each.scale if isinstance(each, RealLayer) else each.multiplier for each in layers]
        multipliers = writer.parts(writer.constant(np.concatenate(factors)), sizes)
        self.multipliers = dict(zip(names, multipliers, strict=True))

    def rounded(self, sums: Sums, source: str, zeros: tuple[str, str], shape: tuple[int, ...]) -> str:
        """`zero_y + rint(float(bias + sum (x - zero_x) * w) * multiplier)`, saturated."""
        attributes = conv_attributes(sums.op) if isinstance(sums.op, Conv2d) else {}
        weight = self._reshaped(self.weights[sums.layer], shape)
        parameters = self.biases[sums.layer], self.multipliers[sums.layer]
        return self._convolved(sums, source, weight, parameters, zeros, attributes)

    def real(self, sums: Sums, source: str, zero: str) -> str:
        """`float(bias + sum (x - zero_x) * w) * multiplier`: the logits."""
        weight = self._reshaped(self.weights[sums.layer], sums.op.weight_shape)
        parameters = self.biases[sums.layer], self.multipliers[sums.layer]
        # The runtime makes a QGemm of this only where no zero point is left out.
        zero = zero or self.writer.constant(np.uint8(0))
        reals = self._reals(sums, source, zero, weight, parameters, with_zeros=True)
        return self.writer.node("Gemm", reals, transB=1)

    def first(self, sums: Sums, image: str, zeros: tuple[str, str], groups: PixelGroups, width: int) -> str:
        """A layer that reads the image (N, H, W, C), so wide, in groups of pixels."""
        op = sums.op
        assert isinstance(op, Conv2d)
        (channels, depth, rows, _), node = op.weight_shape, self.writer.node
        narrow = self._reshaped(self.weights[sums.layer], op.weight_shape)
        column = self.writer.constant(np.array([0, 0, 0, 0, 0, 0, 0, 1], np.int64))
        padded = node("Pad", [narrow, column])
        taps = self.writer.constant(groups.taps.astype(np.int32))
        ordered = node("Transpose", [node("Gather", [padded, taps], axis=3)], perm=(3, 0, 5, 1, 2, 4))
        size = groups.outputs * channels, PIXELS * depth, rows, groups.taps.shape[1]
        weight = self._reshaped(ordered, size)
        times = self.writer.constant(np.array([groups.outputs], np.int64))
        own = self.biases[sums.layer], self.multipliers[sums.layer]
        parameters = node("Tile", [own[0], times]), node("Tile", [own[1], times])
        grouped = self._reshaped(image, (0, 0, width // PIXELS, PIXELS * depth))
        source = node("Transpose", [grouped], perm=_FROM_CHANNELS_LAST)
        attributes = conv_attributes(op) | {
            "strides": (op.stride[0], 1),
            "pads": (op.padding[0], groups.before, op.padding[0], groups.after),
        }
        codes = self._convolved(sums, source, weight, parameters, zeros, attributes)
        last = node("Transpose", [codes], perm=_TO_CHANNELS_LAST)
        pixels = self._reshaped(last, (0, 0, width // PIXELS * groups.outputs, channels))
        return node("Transpose", [pixels], perm=_FROM_CHANNELS_LAST)

    def average(self, source: str, multiplier: np.float32, zeros: tuple[str, str], **window: Any) -> str:
        """The sum of each window as a convolution with ones: `zero_y + rint(float(sum) * multiplier)`."""
        shape = self.writer.constant(np.array(window.pop("shape"), np.int64))
        value = TensorProto(dims=[1], data_type=TensorProto.INT8, raw_data=b"\x01")
        ones = self.writer.node("ConstantOfShape", [shape], value=value)
        weight = self.writer.node("DequantizeLinear", [ones, self.writer.constant(multiplier)])
        real = self.writer.node("Conv", [self._dequantized(source, zeros[0]), weight], **window)
        return self._quantized(real, zeros[1])

    def _convolved(
        self,
        sums: Sums,
        source: str,
        weight: str,
        parameters: tuple[str, str],
        zeros: tuple[str, str],
        attributes: Mapping[str, Any],
    ) -> str:
        reals = self._reals(sums, source, zeros[0], weight, parameters)
        return self._quantized(self.writer.node("Conv", reals, **attributes), zeros[1])

    def _reals(
        self,
        sums: Sums,
        source: str,
        zero: str,
        weight: str,
        parameters: tuple[str, str],
        with_zeros: bool = False,
    ) -> list[str]:
        bias, multiplier = parameters
        zeros, wide = "", sums.bits > FAST_BITS
        if wide or with_zeros:
            channels = self.writer.node("Shape", [multiplier])
            one = self.writer.constant(_WIDE_ZERO if wide else np.int8(0))
            zeros = self.writer.node("Expand", [one, channels])
        real_weight = self.writer.node("DequantizeLinear", [weight, multiplier, zeros], axis=0)
        real_bias = self.writer.node("DequantizeLinear", [bias, multiplier], axis=0)
        return [self._dequantized(source, zero), real_weight, real_bias]

    def _dequantized(self, source: str, zero: str) -> str:
        return self.writer.node("DequantizeLinear", [source, self.writer.constant(UNIT), zero])

    def _quantized(self, real: str, zero: str) -> str:
        return self.writer.node("QuantizeLinear", [real, self.writer.constant(UNIT), zero])

    def _reshaped(self, source: str, shape: Sequence[int]) -> str:
        return self.writer.node("Reshape", [source, self.writer.constant(np.array(shape, np.int64))])

    def _all_biases(self, sums: Sequence[Sums]) -> str:
        """Biases of all layers, one after the other.

        They are stored in 16 bits. The few that do not fit, those of channels with a very small multiplier,
        are stored once more, with their places.
        """
        biases = np.concatenate([each.bias for each in sums])
        narrow = biases.astype(np.int16)
        (wide,) = np.nonzero(narrow != biases)
        name = self.writer.node("Cast", [self.writer.constant(narrow)], to=TensorProto.INT32)
        if not len(wide):
            return name
        inputs = [name, self.writer.constant(wide.astype(np.int32)), self.writer.constant(biases[wide])]
        return self.writer.node("ScatterElements", inputs)


def conv_attributes(op: Conv2d) -> dict[str, Any]:
    """The attributes that differ from the operator's defaults."""
    every: dict[str, tuple[Any, Any]] = {
        "strides": (op.stride, (1, 1)),
        "pads": ((*op.padding, *op.padding), (0, 0, 0, 0)),
        "dilations": (op.dilation, (1, 1)),
        "group": (op.groups, 1),
    }
    return {name: value for name, (value, default) in every.items() if value != default}
