"""An integer program as an ExecuTorch program that XNNPACK runs as a whole.

The program becomes a torch module with explicit quantize and dequantize operators around this project's own
codes, one dequantize for each reader (shared ones split the graph into several delegates). Codes are `int8`,
as XNNPACK knows no other: the image, and whatever goes up to 255, are stored less 128. Weights are `int8` in
memory; at rest, xz brings the file back to about the bits of its planes.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedmpq.export.executorch.additions import IN_INTEGERS
from fedmpq.export.executorch.functions import function_of
from fedmpq.export.executorch.runtime import quiet
from fedmpq.export.executorch.scales import choose_scales
from fedmpq.export.format import FORMAT, MAX_BATCH, VERSION_METHOD, ExportError
from fedmpq.export.operations import Operation, RealLayer, RoundedLayer, RoundedProduct, operations
from fedmpq.export.real_functions import exact_rounding
from fedmpq.model.activations import CodeFormat
from fedmpq.model.graph import INPUT, Conv2d
from fedmpq.model.grid import integer_weights
from fedmpq.model.integer_program import (
    AddCodes,
    FlattenCodes,
    IntegerProgram,
    PoolAverage,
    PoolMax,
    QuantizeReal,
    Requantize,
)
from fedmpq.model.lookup_tables import LookupCodes
from fedmpq.model.never import assert_never
from fedmpq.model.quantized import QuantizedLayer

LOW, HIGH = -128, 127


def lower_to_executorch(
    program: IntegerProgram, layers: Mapping[str, QuantizedLayer], outputs: Sequence[str] = ()
) -> bytes:
    """The program as a `.pte` that takes the image as int8 (N, C, H, W), pixel - 128, and gives the logits.

    With `outputs` it gives the codes of those values instead, for comparing layer by layer.
    """
    with quiet():
        return _lowered(program, tuple(operations(program, layers)), outputs or (program.output,))


def compress(pte: bytes) -> bytes:
    """The `.pte.xz` of a `.pte`."""
    return lzma.compress(pte, preset=9 | lzma.PRESET_EXTREME)


def stored_zero(form: CodeFormat) -> int:
    """What is added to a code to make an `int8` of it."""
    return LOW - form.low if form.high > HIGH or form.low < LOW else 0


def _lowered(program: IntegerProgram, steps: tuple[Operation, ...], outputs: Sequence[str]) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge
    from torch.ao.quantization.fx import _decomposed  # noqa: F401  (registers the operators used here)

    module = _IntegerModule(program, steps, outputs)
    image = program.graph.input
    example = torch.zeros(MAX_BATCH, image.channels, image.height, image.width, dtype=torch.int8)
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    exported = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    aten = torch.ops.aten
    whole = [aten.linear.default, aten.max_pool2d.default, aten.hardswish.default]
    config = EdgeCompileConfig(_check_ir_validity=False, preserve_ops=whole)
    edge = to_edge(exported, constant_methods={VERSION_METHOD: FORMAT}, compile_config=config)
    # torch takes a float bias only, which cannot carry 32 bits; XNNPACK's serializer takes integers too.
    state = edge.exported_program().state_dict
    for name, bias in module.biases.items():
        assert name in state
        state[name] = torch.from_numpy(bias)
    delegated = edge.to_backend(XnnpackPartitioner())
    _check_delegated(delegated.exported_program().graph)
    return bytes(delegated.to_executorch().buffer)


def _check_delegated(graph: torch.fx.Graph) -> None:
    """One call of the delegate and taking its output: portable kernels would be a hundred times slower."""
    calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    left = [call for call in calls if "getitem" not in call and call != "executorch_call_delegate"]
    if left:
        raise ExportError(
            f"XNNPACK does not take {left[0]!r} ({len(left)} operators are left): export to onnx"
        )
    if calls.count("executorch_call_delegate") != 1:
        raise ExportError("XNNPACK takes this model in several parts only: export to onnx")


def _times(value: torch.Tensor, factor: float) -> torch.Tensor:
    return value if factor == 1 else value * factor


class _IntegerModule(nn.Module):
    """Runs the operations in order; buffers bear the number of theirs."""

    def __init__(self, program: IntegerProgram, steps: tuple[Operation, ...], outputs: Sequence[str]) -> None:
        super().__init__()
        self.program = program
        self.outputs = outputs
        self.steps = steps
        self.biases: dict[str, NDArray[np.int32]] = {}
        self.scales = choose_scales(program, steps)
        for number, step in enumerate(steps):
            if isinstance(step, RoundedLayer):
                weight = integer_weights(step.sums.codes, step.sums.bits)
                self._add_weight(number, weight, self.scales.weights[step.output])
                self._add(number, bias=np.zeros(len(weight), np.float32))
                self.biases[f"bias{number}"] = step.sums.bias
            elif isinstance(step, RealLayer):
                weight = integer_weights(step.sums.codes, step.sums.bits)
                bias = step.sums.bias.astype(np.float32)
                self._add(number, weight=weight.astype(np.float32), bias=bias, scale=step.scale)
            elif isinstance(step, PoolAverage):
                channels, *image = program.graph.shapes[step.source]
                kernel = tuple(image) if step.op is None else step.op.kernel
                ones = np.ones((channels, 1, *kernel), np.int8)
                self._add_weight(number, ones, self.scales.weights[step.output])

    def _add_weight(self, number: int, weight: NDArray[np.int8], scale: NDArray[np.float32]) -> None:
        zero = np.zeros(len(weight), np.int64)
        self._add(number, weight=weight, scale=scale, zero=zero)

    def _add(self, number: int, **arrays: NDArray[Any]) -> None:
        for name, array in arrays.items():
            self.register_buffer(f"{name}{number}", torch.from_numpy(array))

    def _get(self, number: int, name: str) -> torch.Tensor:
        return self.get_buffer(f"{name}{number}")

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = {INPUT: image}
        for number, step in enumerate(self.steps):
            values[step.output] = self._computed(number, step, values)
        return tuple(values[name] for name in self.outputs)

    def _computed(self, number: int, step: Operation, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if isinstance(step, RoundedLayer):
            return self._rounded(step.output, self._layer(number, step, values))
        if isinstance(step, RealLayer):
            # Integers in float32, exact while sums stay below 2^24; no rounding follows to amplify more.
            source = self._real(values, step.sums.source)
            sums = functional.linear(source, self._get(number, "weight"), self._get(number, "bias"))
            return sums * self._get(number, "scale")
        if isinstance(step, AddCodes | RoundedProduct):
            return self._combined(step, values)
        if isinstance(step, QuantizeReal):
            return self._rounded_sum(step, values[step.source])
        source = self._real(values, step.source)
        if isinstance(step, Requantize):
            return self._rounded(step.output, source * float(step.multiplier))
        if isinstance(step, PoolMax):
            pooled = functional.max_pool2d(source, step.op.kernel, step.op.stride, step.op.padding)
            return self._rounded(step.output, pooled)
        if isinstance(step, PoolAverage):
            return self._rounded(step.output, self._window_sums(number, step, source))
        if isinstance(step, FlattenCodes):
            features = math.prod(self.program.graph.shapes[step.source])
            return self._rounded(step.output, source.reshape(-1, features))
        if isinstance(step, LookupCodes):
            return self._rounded_function(step, source)
        assert_never(step)

    def _combined(self, step: AddCodes | RoundedProduct, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if isinstance(step, AddCodes):
            left = self._operand(values, step.left, step.left_scale)
            return left + self._operand(values, step.right, step.right_scale)
        # Both factors and the product have scale 1, so that what is multiplied is whole numbers.
        product = self._real(values, step.left) * self._real(values, step.right)
        return self._rounded(step.output, product * float(step.multiplier))

    def _layer(self, number: int, step: RoundedLayer, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        op, source = step.sums.op, self._real(values, step.sums.source)
        weight, bias = self._weight(number), self._get(number, "bias")
        if isinstance(op, Conv2d):
            return functional.conv2d(source, weight, bias, op.stride, op.padding, op.dilation, op.groups)
        return functional.linear(source, weight, bias)

    def _window_sums(self, number: int, step: PoolAverage, source: torch.Tensor) -> torch.Tensor:
        weight = self._weight(number)
        stride, padding = ((1, 1), (0, 0)) if step.op is None else (step.op.stride, step.op.padding)
        return functional.conv2d(source, weight, None, stride, padding, groups=len(weight))

    def _weight(self, number: int) -> torch.Tensor:
        parts = (self._get(number, name) for name in ("weight", "scale", "zero"))
        real: torch.Tensor = torch.ops.quantized_decomposed.dequantize_per_channel(
            *parts, 0, -HIGH, HIGH, torch.int8
        )
        return real

    def _operand(self, values: Mapping[str, torch.Tensor], name: str, scale: np.float32) -> torch.Tensor:
        real = self._real(values, name)
        return real if self.scales.own else real * float(scale)

    def _rounded_sum(self, step: QuantizeReal, real: torch.Tensor) -> torch.Tensor:
        if not self.scales.own:
            # Divided first: XNNPACK's own quantization multiplies by 1/scale, which rounds otherwise.
            return self._rounded(step.output, real / float(step.scale))
        factor = self.scales.factors[step.output]
        if factor != IN_INTEGERS:
            return self._rounded(step.output, real if factor == 1 else real * float(factor))
        # Quantized at once, so that the sum is in integers; the clamp is a step of its own.
        stored = self._stored(step.output)
        codes = torch.ops.quantized_decomposed.quantize_per_tensor(real, *stored)
        return self._rounded(
            step.output, torch.ops.quantized_decomposed.dequantize_per_tensor(codes, *stored)
        )

    def _rounded_function(self, step: LookupCodes, source: torch.Tensor) -> torch.Tensor:
        """The function in float32, which XNNPACK has, where that is exact."""
        form, target = self.program.formats[step.source], self.program.formats[step.output]
        rounding = exact_rounding(step, form, target, np.arange(form.low, form.high + 1))
        if rounding is None:
            raise ExportError(
                f"{step.op.function} before {step.output!r} has codes next to a tie, which XNNPACK may round"
                " otherwise: export to onnx"
            )
        # Stored scales may be 1 in place of the program's.
        stored_source, stored_output = (float(self.scales.of(name)) for name in (step.source, step.output))
        value = function_of(step.op, _times(source, float(form.scale) / stored_source))
        value = _times(value, rounding.factor * stored_output / float(target.scale))
        if rounding.offset:
            value = value + rounding.offset * stored_output
        return self._rounded(step.output, value)

    def _real(self, values: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        real: torch.Tensor = torch.ops.quantized_decomposed.dequantize_per_tensor(
            values[name], *self._stored(name)
        )
        return real

    def _rounded(self, output: str, real: torch.Tensor) -> torch.Tensor:
        form = self.program.formats[output]
        zero, scale = stored_zero(form), float(self.scales.of(output))
        if (form.low + zero, form.high + zero) != (LOW, HIGH):
            real = functional.hardtanh(real, form.low * scale, form.high * scale)
        codes: torch.Tensor = torch.ops.quantized_decomposed.quantize_per_tensor(real, *self._stored(output))
        return codes

    def _stored(self, name: str) -> tuple[float, int, int, int, torch.dtype]:
        """Scale, zero point and range of a value; in XNNPACK all its readers share them."""
        form = self.program.formats[name]
        return float(self.scales.of(name)), stored_zero(form), LOW, HIGH, torch.int8
