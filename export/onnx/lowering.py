"""An integer program as an ONNX model of standard operators, each layer's weights as packed bit-planes.

Codes are bytes: unsigned ones as they are, signed ones with zero point 128 (`uint8` times `int8` is what CPUs
multiply fastest), the image with its own. Integer weights that fit ±63 are `int8`. Wider ones, of 7 and 8
bits, are `uint8` with zero point 128: x86 without VNNI and some ARM cores add pairs of products in 16 bits,
which full-range `int8` weights saturate; for `uint8` weights they take another way.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from fedmpq.export.format import FORMAT, INPUT_NAME, METADATA_KEY, OUTPUT_NAME
from fedmpq.export.onnx.float_functions import function_of
from fedmpq.export.onnx.integer_add import Operand, Ratios, exact_ratios
from fedmpq.export.onnx.layers import UNIT, LayerWriter
from fedmpq.export.onnx.pixel_groups import PixelGroups, pixel_groups
from fedmpq.export.onnx.shapes import rearranged, uneven_sums, window_attributes
from fedmpq.export.onnx.writer import OnnxWriter
from fedmpq.export.operations import (
    Operation,
    OperationOfOne,
    RealLayer,
    RoundedLayer,
    RoundedProduct,
    operations,
)
from fedmpq.export.pooling import is_even
from fedmpq.export.real_functions import Rounding, exact_rounding
from fedmpq.model.activations import CodeFormat
from fedmpq.model.graph import INPUT, AvgPool, Conv2d, GlobalAvgPool
from fedmpq.model.integer_program import AddCodes, Dequantize, IntegerProgram, QuantizeReal, Requantize
from fedmpq.model.lookup_tables import LookupCodes
from fedmpq.model.never import assert_never
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.shape_steps import ConcatCodes, FlattenCodes, PoolAverage, PoolMax, Rearrange

SIGNED_ZERO = 128


@dataclass(frozen=True)
class OnnxModel:
    """A lowered model; `names` says which of the file's values is which of the program's."""

    proto: onnx.ModelProto
    names: Mapping[str, str]

    def to_bytes(self) -> bytes:
        return self.proto.SerializeToString(deterministic=True)


def lower_to_onnx(
    program: IntegerProgram, layers: Mapping[str, QuantizedLayer], metadata: Mapping[str, Any]
) -> OnnxModel:
    """The program as a model from `image`, uint8 (N, H, W, C), to `logits`, float32 (N, classes).

    `metadata` goes into the file as JSON, beside the format's version.
    """
    return _Lowering(program, tuple(operations(program, layers))).run(metadata)


def zero_point(form: CodeFormat) -> int:
    """What is added to a code to make a byte of it."""
    if form.high - form.low == 255:
        return -form.low
    return SIGNED_ZERO if form.low < 0 else 0


def byte_table(step: LookupCodes, formats: Mapping[str, CodeFormat]) -> NDArray[np.uint8]:
    """The stored code of the output for each of 256 stored codes; one beyond the codes is as the nearest."""
    codes = np.arange(256) - zero_point(formats[step.source])
    places = np.clip(codes - step.low, 0, len(step.table) - 1)
    return (step.table[places] + zero_point(formats[step.output])).astype(np.uint8)


class _Lowering:
    def __init__(self, program: IntegerProgram, steps: tuple[Operation, ...]) -> None:
        self.program = program
        self.steps = steps
        self.writer = OnnxWriter()
        self.names: dict[str, str] = {}
        self.sums = {step.output: step for step in steps if isinstance(step, AddCodes)}
        self.ratios: dict[str, Ratios] = {}
        self.roundings: dict[str, Rounding | None] = {}
        self.unclamped: set[str] = set()
        self.groups = {step.output: groups for step in steps if (groups := self._pixel_groups(step))}

    def run(self, metadata: Mapping[str, Any]) -> OnnxModel:
        branches = _read_by_one_sum(self.steps)
        for step in self.steps:
            if isinstance(step, QuantizeReal):
                self._plan_sum(self.sums[step.source], step, branches)
        self._plan_functions()
        layers = [step for step in self.steps if isinstance(step, RoundedLayer | RealLayer)]
        self.layers = LayerWriter(self.writer, layers)
        if any(INPUT in _sources(step) and step.output not in self.groups for step in self.steps):
            self.names[INPUT] = self.writer.node("Transpose", [INPUT_NAME], perm=[0, 3, 1, 2])
        for step in self.steps:
            if isinstance(step, ConcatCodes):
                self.names[step.output] = self._joined(step)
            elif not isinstance(step, AddCodes):
                self.names[step.output] = self._lowered(step)
        output = self._real(self.program.output)
        self.names[self.program.output] = self.writer.node("Identity", [output], output=OUTPUT_NAME)
        model, names = self.writer.model(*self._interface(), self.names)
        text = json.dumps({"format": FORMAT, **metadata}, ensure_ascii=False, separators=(",", ":"))
        helper.set_model_props(model, {METADATA_KEY: text})
        return OnnxModel(model, names)

    def _interface(self) -> tuple[str, list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        """The graph's name, inputs and outputs."""
        graph = self.program.graph
        image: list[str | int] = ["N", graph.input.height, graph.input.width, graph.input.channels]
        logits: list[str | int] = ["N", *graph.shapes[graph.output]]
        return (
            graph.name,
            [helper.make_tensor_value_info(INPUT_NAME, TensorProto.UINT8, image)],
            [helper.make_tensor_value_info(OUTPUT_NAME, TensorProto.FLOAT, logits)],
        )

    def _lowered(self, step: OperationOfOne | RoundedProduct) -> str:
        if isinstance(step, RoundedProduct):
            return self._rounded_product(step)
        if isinstance(step, RoundedLayer):
            return self._rounded_layer(step)
        if isinstance(step, RealLayer):
            source = step.sums.source
            return self.layers.real(step.sums, self.names[source], self._zero(source))
        if isinstance(step, QuantizeReal):
            return self._rounded_sum(step)
        if isinstance(step, Requantize):
            real = self._dequantized(step.source, UNIT)
            product = self.writer.node("Mul", [real, self.writer.constant(step.multiplier)])
            return self._quantized(step.output, product, UNIT)
        if isinstance(step, LookupCodes):
            return self._looked_up(step)
        if isinstance(step, Dequantize):
            return self._dequantized(step.source, np.float32(step.scale))
        return self._shaped(step)

    def _shaped(self, step: PoolMax | PoolAverage | FlattenCodes | Rearrange) -> str:
        if isinstance(step, PoolMax):
            return self._max_pool(step)
        if isinstance(step, PoolAverage):
            return self._average(step)
        if isinstance(step, FlattenCodes):
            return self.writer.node("Flatten", [self.names[step.source]])
        if isinstance(step, Rearrange):
            codes, zero = self.names[step.source], self._zero(step.source)
            return rearranged(self.writer, step.op, codes, zero, self.program.graph.shapes[step.source])
        assert_never(step)

    def _joined(self, step: ConcatCodes) -> str:
        """Codes rounded to the common scale lie within its range, so they need not be clamped."""
        parts = []
        for source, multiplier in zip(step.sources, step.multipliers, strict=True):
            real = self._dequantized(source, UNIT)
            product = self.writer.node("Mul", [real, self.writer.constant(multiplier)])
            inputs = [product, self.writer.constant(UNIT), self._zero(step.output)]
            parts.append(self.writer.node("QuantizeLinear", inputs))
        return self.writer.node("Concat", parts, axis=1)

    def _real(self, name: str) -> str:
        """A real value; a sum is computed when first asked for, which is seldom."""
        if name not in self.names:
            self.names[name] = self._sum(self.sums[name])
        return self.names[name]

    def _sum(self, step: AddCodes) -> str:
        # a - (-b): the runtime would replace an Add between quantized values by a sum that rounds otherwise.
        left = self._dequantized(step.left, step.left_scale)
        return self.writer.node("Sub", [left, self._dequantized(step.right, -step.right_scale)])

    def _rounded_sum(self, step: QuantizeReal) -> str:
        """An Add, of which the runtime makes a QLinearAdd, where that is exact; else a sum in float32."""
        add, ratios = self.sums[step.source], self.ratios.get(step.output)
        if ratios is None:
            return self._quantized(step.output, self._real(step.source), step.scale)
        operands = [self._dequantized(add.left, ratios[0]), self._dequantized(add.right, ratios[1])]
        return self._quantized(step.output, self.writer.node("Add", operands), UNIT)

    def _plan_sum(self, add: AddCodes, rounding: QuantizeReal, branches: AbstractSet[str]) -> None:
        """Ratios for QLinearAdd, if possible such that operands in `branches` need not be clamped first."""
        formats = self.program.formats
        zero_sum = zero_point(formats[rounding.output])
        spared = {add.left, add.right} & branches
        for unclamped in (spared, {add.left} & spared, {add.right} & spared, set[str]()):
            left, right = (
                Operand(formats[name], zero_point(formats[name]), name not in unclamped)
                for name in (add.left, add.right)
            )
            ratios = exact_ratios(add, rounding, left, right, zero_sum)
            if ratios is not None:
                self.ratios[rounding.output] = ratios
                self.unclamped |= unclamped
                return

    def _plan_functions(self) -> None:
        """Roundings for functions; what only functions read need not be clamped first, if they can do it."""
        formats = self.program.formats
        steps = [step for step in self.steps if isinstance(step, LookupCodes)]
        others = {name for step in self.steps if not isinstance(step, LookupCodes) for name in _sources(step)}
        layers = {step.output for step in self.steps if isinstance(step, RoundedLayer)}
        for name in dict.fromkeys(step.source for step in steps):
            form, readers = formats[name], [step for step in steps if step.source == name]
            every = np.arange(256) - zero_point(form)
            own = np.arange(form.low, form.high + 1)
            for codes in (every, own) if name in layers - others else (own,):
                found = [exact_rounding(step, form, formats[step.output], codes) for step in readers]
                if codes is every and all(found):
                    self.unclamped.add(name)
                    break
            self.roundings.update({step.output: each for step, each in zip(readers, found, strict=True)})

    def _rounded_layer(self, step: RoundedLayer) -> str:
        sums, zeros = step.sums, (self._zero(step.sums.source), self._zero(step.output))
        if step.output in self.groups:
            width = self.program.graph.input.width
            codes = self.layers.first(sums, INPUT_NAME, zeros, self.groups[step.output], width)
            return self._clamped(step.output, codes)
        source = self.names[sums.source]
        shape = sums.op.weight_shape if isinstance(sums.op, Conv2d) else (*sums.op.weight_shape, 1, 1)
        features = self.program.graph.shapes[sums.source]
        if len(features) == 1:
            # A convolution of one pixel, so that all layers round alike.
            pixel = self.writer.constant(np.array([-1, *features, 1, 1], np.int64))
            source = self.writer.node("Reshape", [source, pixel])
        codes = self.layers.rounded(sums, source, zeros, shape)
        if len(features) == 1:
            codes = self.writer.node("Flatten", [codes])
        return self._clamped(step.output, codes)

    def _pixel_groups(self, step: Operation) -> PixelGroups | None:
        if not isinstance(step, RoundedLayer) or step.sums.source != INPUT:
            return None
        op, width = step.sums.op, self.program.graph.input.width
        return pixel_groups(op, width, step.sums.bits) if isinstance(op, Conv2d) else None

    def _max_pool(self, step: PoolMax) -> str:
        attributes = window_attributes(step.op, self.program.graph.shapes[step.source])
        return self.writer.node(
            "MaxPool", [self.names[step.source]], kernel_shape=step.op.kernel, **attributes
        )

    def _average(self, step: PoolAverage) -> str:
        source = self.program.graph.shapes[step.source]
        if not is_even(step):
            real = uneven_sums(self.writer, step, self._dequantized(step.source, UNIT), source)
            product = self.writer.node("Mul", [real, self.writer.constant(step.multipliers)])
            return self._quantized(step.output, product, UNIT)
        assert isinstance(step.op, AvgPool | GlobalAvgPool)
        channels, *image = source
        kernel = step.op.kernel if isinstance(step.op, AvgPool) else tuple(image)
        zeros = self._zero(step.source), self._zero(step.output)
        window: dict[str, Any] = {"shape": (channels, 1, *kernel), **window_attributes(step.op, source)}
        codes = self.layers.average(
            self.names[step.source], step.multipliers[0, 0], zeros, group=channels, **window
        )
        return self._clamped(step.output, codes)

    def _rounded_product(self, step: RoundedProduct) -> str:
        """In float32, where the product of two codes is exact; QLinearMul would round otherwise."""
        factors = [self._dequantized(name, UNIT) for name in (step.left, step.right)]
        product = self.writer.node("Mul", factors)
        scaled = self.writer.node("Mul", [product, self.writer.constant(step.multiplier)])
        return self._quantized(step.output, scaled, UNIT)

    def _looked_up(self, step: LookupCodes) -> str:
        """The function in float32 where that is exact; else a Gather, some ten times slower."""
        rounding, target = self.roundings[step.output], self.program.formats[step.output]
        if rounding is not None:
            scale = np.float32(target.scale / np.float32(rounding.factor))
            real = self._dequantized(step.source, self.program.formats[step.source].scale)
            value = function_of(self.writer, step.op, real)
            if rounding.offset:
                shift = self.writer.constant(np.float32(rounding.offset * scale))
                value = self.writer.node("Add", [value, shift])
            if rounding.clamps:
                return self._quantized(step.output, value, scale)
            zero = self._zero(step.output)
            return self.writer.node("QuantizeLinear", [value, self.writer.constant(scale), zero])
        table = byte_table(step, self.program.formats)
        places = self.writer.node("Cast", [self.names[step.source]], to=TensorProto.INT32)
        return self.writer.node("Gather", [self.writer.constant(table), places])

    def _dequantized(self, source: str, scale: np.float32) -> str:
        inputs = [self.names[source], self.writer.constant(scale), self._zero(source)]
        return self.writer.node("DequantizeLinear", inputs)

    def _quantized(self, output: str, real: str, scale: np.float32) -> str:
        codes = self.writer.node("QuantizeLinear", [real, self.writer.constant(scale), self._zero(output)])
        return self._clamped(output, codes)

    def _clamped(self, output: str, codes: str) -> str:
        """Codes that fill all 256 bytes are saturated already; some others are clamped by what reads them."""
        form = self.program.formats[output]
        low, high = zero_point(form) + form.low, zero_point(form) + form.high
        if (low, high) == (0, 255) or output in self.unclamped:
            return codes
        least = self.writer.constant(np.uint8(low)) if low else ""
        greatest = self.writer.constant(np.uint8(high)) if high < 255 else ""
        return self.writer.node("Clip", [codes, least, greatest])

    def _zero(self, value: str) -> str:
        """The constant that stands for code 0; nothing where that is the byte 0, as operators take it."""
        zero = zero_point(self.program.formats[value])
        return self.writer.constant(np.uint8(zero)) if zero else ""


def _read_by_one_sum(steps: Sequence[Operation]) -> set[str]:
    """Outputs of layers that one addition reads, and nothing else."""
    layers = {step.output for step in steps if isinstance(step, RoundedLayer)}
    sums = Counter[str]()
    for step in steps:
        if isinstance(step, AddCodes):
            sums.update((step.left, step.right))
    others = {name for step in steps if not isinstance(step, AddCodes) for name in _sources(step)}
    return {name for name in layers - others if sums[name] == 1}


def _sources(step: Operation) -> tuple[str, ...]:
    """What the step reads."""
    if isinstance(step, AddCodes | RoundedProduct):
        return (step.left, step.right)
    if isinstance(step, ConcatCodes):
        return step.sources
    return (step.sums.source if isinstance(step, RoundedLayer | RealLayer) else step.source,)
