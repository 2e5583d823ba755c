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
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedmpq.export.executorch.additions import IN_INTEGERS
from fedmpq.export.executorch.functions import function_of
from fedmpq.export.executorch.last_layer import real_sums, with_bias
from fedmpq.export.executorch.runtime import quiet
from fedmpq.export.executorch.scales import choose_scales
from fedmpq.export.executorch.shapes import copies, joined, mixed, padding, selection
from fedmpq.export.format import FORMAT, MAX_BATCH, VERSION_METHOD, ExportError
from fedmpq.export.operations import Operation, RealLayer, RoundedLayer, RoundedProduct, operations
from fedmpq.export.pooling import cover, end_padding, is_even
from fedmpq.export.real_functions import exact_rounding
from fedmpq.model.activations import CodeFormat
from fedmpq.model.graph import INPUT, AvgPool, Conv2d, Pad, Upsample
from fedmpq.model.grid import integer_weights
from fedmpq.model.integer_program import AddCodes, Dequantize, IntegerProgram, QuantizeReal, Requantize
from fedmpq.model.lookup_tables import LookupCodes
from fedmpq.model.never import assert_never
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.shape_steps import ConcatCodes, FlattenCodes, PoolAverage, PoolMax, Rearrange

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
                self._add_last(number, step)
            elif isinstance(step, PoolAverage):
                self._add_average(number, step)
            elif isinstance(step, Rearrange):
                self._add_rearrangement(number, step)

    def _add_last(self, number: int, step: RealLayer) -> None:
        weight = integer_weights(step.sums.codes, step.sums.bits)
        whole = with_bias(weight, step.sums.bias, self.program.formats[step.sums.source])
        if whole is not None:
            self._add_weight(number, whole, step.scale)
            return
        bias = step.sums.bias.astype(np.float32)
        self._add(number, weight=weight.astype(np.float32), bias=bias, scale=step.scale)

    def _add_average(self, number: int, step: PoolAverage) -> None:
        channels, *image = self.program.graph.shapes[step.source]
        if is_even(step):
            kernel = step.op.kernel if isinstance(step.op, AvgPool) else tuple(image)
            ones = np.ones((channels, 1, *kernel), np.int8)
            self._add_weight(number, ones, self.scales.weights[step.output])
            return
        rows, columns = cover(step.windows.rows, image[0]), cover(step.windows.columns, image[1])
        self._add(number, rows=rows[:, :, None, None], columns=columns, multipliers=step.multipliers)

    def _add_rearrangement(self, number: int, step: Rearrange) -> None:
        op, shape = step.op, self.program.graph.shapes[step.source]
        if isinstance(op, Upsample):
            rows, columns = copies(op, shape)
            self._add(number, rows=rows[:, :, None, None], columns=columns)
            return
        weight = padding(op, shape[0])[0] if isinstance(op, Pad) else selection(op, shape[0])
        self._add_weight(number, weight, np.ones(len(weight), np.float32))

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
            return self._last(number, self._real(values, step.sums.source))
        if isinstance(step, AddCodes | RoundedProduct):
            return self._combined(step, values)
        if isinstance(step, QuantizeReal):
            return self._rounded_sum(step, values[step.source])
        if isinstance(step, ConcatCodes):
            return self._joined(step, values)
        source = self._real(values, step.source)
        if isinstance(step, Dequantize):
            return source if self.scales.own else source * float(step.scale)
        if isinstance(step, LookupCodes):
            return self._rounded_function(step, source)
        if isinstance(step, Requantize):
            return self._rounded(step.output, source * float(step.multiplier))
        return self._rounded(step.output, self._shaped(number, step, source))

    def _shaped(
        self, number: int, step: PoolMax | PoolAverage | FlattenCodes | Rearrange, source: torch.Tensor
    ) -> torch.Tensor:
        if isinstance(step, PoolMax):
            return self._greatest(step, source)
        if isinstance(step, PoolAverage):
            return self._window_sums(number, step, source)
        if isinstance(step, FlattenCodes):
            return source.reshape(-1, math.prod(self.program.graph.shapes[step.source]))
        if isinstance(step, Rearrange):
            return self._moved(number, step, source)
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
        if not isinstance(op, Conv2d):
            return functional.linear(source, weight, bias)
        features = self.program.graph.shapes[step.sums.source]
        if len(features) == 1:
            source = self._again(step.sums.source, source.reshape(-1, *features, 1, 1))
        sums = functional.conv2d(source, weight, bias, op.stride, op.padding, op.dilation, op.groups)
        if len(features) > 1:
            return sums
        return self._real({step.output: self._rounded(step.output, sums)}, step.output).reshape(-1, *features)

    def _last(self, number: int, source: torch.Tensor) -> torch.Tensor:
        weight = self._get(number, "weight")
        if weight.dtype == torch.int8:
            return real_sums(source, self._weight(number), weight.shape[1] - source.shape[1])
        # Integers in float32, exact while sums stay below 2^24; no rounding follows to amplify more.
        return functional.linear(source, weight, self._get(number, "bias")) * self._get(number, "scale")

    def _again(self, name: str, real: torch.Tensor) -> torch.Tensor:
        """Quantized and dequantized, between two operators that compute on codes."""
        codes = torch.ops.quantized_decomposed.quantize_per_tensor(real, *self._stored(name))
        return self._real({name: codes}, name)

    def _joined(self, step: ConcatCodes, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Codes rounded to the common scale lie within its range, so they need not be clamped."""
        again = partial(self._again, step.output)
        pairs = zip(step.sources, step.multipliers, strict=True)
        parts = [again(self._real(values, name) * float(multiplier)) for name, multiplier in pairs]
        return self._rounded(step.output, joined(parts, again))

    def _greatest(self, step: PoolMax, source: torch.Tensor) -> torch.Tensor:
        """XNNPACK has no ceil mode for a batch that is not fixed: less than the least code pads the end."""
        op, zeros = step.op, step.op.padding
        if op.ceil_mode:
            form, scale = self.program.formats[step.source], float(self.scales.of(step.source))
            bottom, right = end_padding(op, self.program.graph.shapes[step.source])
            sides = (zeros[1], right, zeros[0], bottom)
            source, zeros = functional.pad(source, sides, value=(form.low - 1) * scale), (0, 0)
        return functional.max_pool2d(source, op.kernel, op.stride, zeros)

    def _moved(self, number: int, step: Rearrange, source: torch.Tensor) -> torch.Tensor:
        op = step.op
        shape = self.program.graph.shapes[step.source]
        if isinstance(op, Upsample):
            return mixed(source, self._get(number, "rows"), self._get(number, "columns"), shape)
        weight = self._weight(number)
        if isinstance(op, Pad):
            _, zeros = padding(op, shape[0])
            return functional.conv2d(source, weight, padding=zeros, groups=len(weight))
        return functional.conv2d(source, weight)

    def _window_sums(self, number: int, step: PoolAverage, source: torch.Tensor) -> torch.Tensor:
        """Times the multiplier, which of even windows is the scale of the weights."""
        if not is_even(step):
            matrices = self._get(number, "rows"), self._get(number, "columns")
            sums = mixed(source, *matrices, self.program.graph.shapes[step.source])
            return sums * self._get(number, "multipliers")
        weight = self._weight(number)
        if not isinstance(step.op, AvgPool):
            return functional.conv2d(source, weight, groups=len(weight))
        return functional.conv2d(source, weight, None, step.op.stride, step.op.padding, groups=len(weight))

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
