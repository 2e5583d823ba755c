"""A graph, its codes and its side tensors, compiled to the integer program every runtime must match.

BatchNorm is folded into per-channel scales, the codes stay untouched. With `s_x` the input's scale,
`f = gamma / sqrt(var + eps)`, `s_w = integer_scale * f` and `B = beta + (bias - mean) * f`, all float32, in
this order:

    bias_int = rint(B / (s_x * s_w))                   M = s_x * s_w / s_y
    code     = clamp(rint(float(acc + bias_int) * M), low, high)       rounding half to even

Where gamma is zero or nearly so, `bias_int` would overflow. There `|B| / 2^30` takes the place of a smaller
`|s_x * s_w|`, and the channel gives `B` to within one part in `2^30 / |acc|`.

The steps below are that program in execution order: what `integer_forward` runs and what exporters lower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.activations import CodeFormat
from fedmpq.model.code_products import MultiplyCodes, ProductOfCodes
from fedmpq.model.graph import (
    INPUT,
    Add,
    BatchNorm,
    Concat,
    Conv2d,
    Graph,
    Linear,
    Lookup,
    Mul,
    Node,
    Quantize,
    Relu,
)
from fedmpq.model.lookup_tables import FunctionOfCodes, LookupCodes
from fedmpq.model.never import assert_never
from fedmpq.model.ops import ShapeOp
from fedmpq.model.quantized import QuantizedLayer, identity_layer
from fedmpq.model.quantizers import bound_before
from fedmpq.model.shape_steps import NewFormat, ShapeStep, shape_step
from fedmpq.model.state_checks import ProgramError, check_state

Vector = NDArray[np.float32]

MAX_BIAS = 2.0**30
# With the longest sums of products that a graph allows, this much more still fits an int32.
MAX_BIAS_OF_LONG_SUMS = 2.0**24
_TINY_SCALE = np.float32(2.0**-80)


@dataclass(frozen=True)
class Accumulate:
    """`acc = bias + sum codes * weight` in int32, zero-padded; its real value is `float(acc) * scale`."""

    output: str
    source: str
    op: Conv2d | Linear
    weight: NDArray[np.int8]
    bias: NDArray[np.int32]
    scale: Vector
    bound: int
    """The greatest |code| that is read."""


@dataclass(frozen=True)
class Requantize:
    """`code = clamp(rint(float(source) * multiplier), low, high)`; one multiplier, or one per channel."""

    output: str
    source: str
    multiplier: Vector
    low: int
    high: int


@dataclass(frozen=True)
class Dequantize:
    """`real = float(source) * scale`."""

    output: str
    source: str
    scale: Vector


@dataclass(frozen=True)
class AddCodes:
    """`real = float(left) * left_scale + float(right) * right_scale`."""

    output: str
    left: str
    right: str
    left_scale: np.float32
    right_scale: np.float32


@dataclass(frozen=True)
class QuantizeReal:
    """`code = clamp(rint(real / scale), low, high)`."""

    output: str
    source: str
    scale: np.float32
    low: int
    high: int


Step = (
    Accumulate | Requantize | Dequantize | AddCodes | QuantizeReal | LookupCodes | MultiplyCodes | ShapeStep
)


@dataclass(frozen=True)
class IntegerProgram:
    """Steps in execution order; the value named `output` is the logits.

    `formats` says of every tensor of codes, the image included, what the codes mean.
    """

    graph: Graph
    steps: tuple[Step, ...]
    formats: Mapping[str, CodeFormat]
    output: str


@dataclass(frozen=True)
class FoldedProduct:
    """A convolution or linear layer before its accumulator is asked for: BatchNorm may still fold into it."""

    name: str
    source: str
    op: Conv2d | Linear
    layer: QuantizedLayer
    input: CodeFormat
    weight_scale: Vector
    """Real value of one step of the integer weights, per output channel."""
    offset: Vector
    """Added to the real sum."""

    @property
    def weight(self) -> NDArray[np.int8]:
        return self.layer.integer_weights()


@dataclass(frozen=True)
class _Real:
    name: str


@dataclass(frozen=True)
class _Rectified:
    """A value after ReLU: the clamp at zero is left to the unsigned quantization that follows."""

    value: FoldedProduct | _Real | CodeFormat | FunctionOfCodes | ProductOfCodes
    source: str


_Value = CodeFormat | FoldedProduct | _Real | FunctionOfCodes | ProductOfCodes | _Rectified


Normalise = Callable[[Node, FoldedProduct, list[Step]], tuple[Vector, Vector]]
"""`(BatchNorm, the layer it reads, the steps before it) -> mean and variance` to fold it with."""


def compile_program(
    graph: Graph,
    layers: Mapping[str, QuantizedLayer],
    side: Mapping[str, NDArray[np.float32]],
    normalise: Normalise | None = None,
) -> IntegerProgram:
    """Fold and order everything; missing or misshapen layers and side tensors are refused.

    BatchNorms are folded with their running statistics, or with what `normalise` says.
    """
    check_state(graph, layers, side)
    # What overflows float32 is found and named by the compiler.
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        return _Compiler(graph, layers, side, normalise).run()


class _Compiler:
    def __init__(
        self,
        graph: Graph,
        layers: Mapping[str, QuantizedLayer],
        side: Mapping[str, NDArray[np.float32]],
        normalise: Normalise | None,
    ) -> None:
        self.normalise = normalise
        self.graph = graph
        self.layers = layers
        self.side = side
        self.steps: list[Step] = []
        self.accumulated: dict[str, Vector] = {}
        image = CodeFormat.image(graph.input.scale, graph.input.zero_point)
        self.values: dict[str, _Value] = {INPUT: image}

    def run(self) -> IntegerProgram:
        for node in self.graph.nodes:
            self.values[node.name] = self._compile(node)
        output = self._logits(self.values[self.graph.output])
        formats = {name: value for name, value in self.values.items() if isinstance(value, CodeFormat)}
        return IntegerProgram(self.graph, tuple(self.steps), formats, output)

    def _compile(self, node: Node) -> _Value:
        op, source = node.op, node.inputs[0]
        if isinstance(op, Conv2d | Linear):
            return self._product(node, op)
        if isinstance(op, BatchNorm):
            return self._folded(node, op)
        if isinstance(op, Relu):
            return self._rectified(node)
        if isinstance(op, Quantize):
            return self._quantized(node, op)
        if isinstance(op, Add | Mul):
            return self._combined(node, op)
        if isinstance(op, Lookup):
            return FunctionOfCodes(source, op, self._codes(source, node))
        if isinstance(op, ShapeOp):
            return self._shaped(node, op)
        assert_never(op)

    def _combined(self, node: Node, op: Add | Mul) -> _Value:
        left, right = node.inputs
        left_scale, right_scale = (self._codes(name, node).scale for name in node.inputs)
        if isinstance(op, Add):
            self.steps.append(AddCodes(node.name, left, right, left_scale, right_scale))
            return _Real(node.name)
        self.steps.append(MultiplyCodes(node.name, left, right))
        return ProductOfCodes(np.float32(left_scale * right_scale))

    def _codes(self, name: str, reader: Node) -> CodeFormat:
        value = self.values[name]
        if not isinstance(value, CodeFormat):
            raise ProgramError(
                f"{reader.name!r} reads {name!r}, which is not quantized;"
                " pass the graph through place_quantizers"
            )
        return value

    def _product(self, node: Node, op: Conv2d | Linear) -> FoldedProduct:
        layer = self.layers[node.name]
        out = len(layer.codes)
        bias = self.side[f"{node.name}.bias"] if op.bias else np.zeros(out, np.float32)
        scale = np.broadcast_to(layer.integer_scale(), (out,)).astype(np.float32)
        source = node.inputs[0]
        return FoldedProduct(node.name, source, op, layer, self._codes(source, node), scale, bias)

    def _folded(self, node: Node, op: BatchNorm) -> FoldedProduct:
        product = self.values[node.inputs[0]]
        if isinstance(product, CodeFormat):
            product = _unchanged(node, op.channels, product)
        if not isinstance(product, FoldedProduct):
            raise ProgramError(
                f"BatchNorm {node.name!r} reads {node.inputs[0]!r}, which is neither a layer nor quantized;"
                " pass the graph through place_quantizers"
            )
        gamma, beta, mean, variance = (
            self.side[f"{node.name}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        if self.normalise is not None:
            mean, variance = self.normalise(node, product, self.steps)
        deviation: Vector = np.sqrt(np.maximum(variance, np.float32(0)) + np.float32(op.eps))
        factor: Vector = gamma / deviation
        weight_scale: Vector = product.weight_scale * factor
        offset: Vector = beta + (product.offset - mean) * factor
        return replace(product, name=node.name, weight_scale=weight_scale, offset=offset)

    def _rectified(self, node: Node) -> _Rectified:
        value = self.values[node.inputs[0]]
        if isinstance(value, _Rectified):
            raise ProgramError(f"ReLU {node.name!r} directly follows another ReLU; remove one of them")
        return _Rectified(value, node.inputs[0])

    def _quantized(self, node: Node, op: Quantize) -> CodeFormat:
        source, maximum = node.inputs[0], bound_before(self.graph, node)
        value = self.values[source]
        if isinstance(value, _Rectified):
            source, value = value.source, value.value
            if op.signed:
                raise ProgramError(f"{node.name!r} quantizes a ReLU's output with a sign; make it unsigned")
        target = CodeFormat.quantized(np.float32(self.side[f"{node.name}.clip"]), maximum, op.bits, op.signed)
        if isinstance(value, _Real):
            self.steps.append(QuantizeReal(node.name, value.name, target.scale, target.low, target.high))
            return target
        if isinstance(value, FunctionOfCodes):
            self.steps.append(value.rounded(node.name, target))
            return target
        if isinstance(value, FoldedProduct):
            source, scale = value.name, self._accumulate(value)
        elif isinstance(value, CodeFormat | ProductOfCodes):
            scale = np.asarray(value.scale, dtype=np.float32)
        else:
            assert_never(value)
        multiplier = _finite(node.name, np.asarray(scale / target.scale, dtype=np.float32))
        self.steps.append(Requantize(node.name, source, multiplier, target.low, target.high))
        return target

    def _accumulate(self, product: FoldedProduct) -> Vector:
        """Emit the accumulator once, however many read it; its per-channel scale `s_x * s_w`."""
        if product.name in self.accumulated:
            return self.accumulated[product.name]
        offset = _finite(product.name, product.offset)
        scale = _finite(product.name, product.input.scale * product.weight_scale)
        least = np.maximum(np.abs(offset) / np.float32(_max_bias(product)), _TINY_SCALE)
        scale = np.where(np.abs(scale) < least, np.copysign(least, scale), scale).astype(np.float32)
        bias = np.rint(offset / scale).astype(np.int32)
        step = Accumulate(
            product.name, product.source, product.op, product.weight, bias, scale, product.input.bound
        )
        self.steps.append(step)
        self.accumulated[product.name] = scale
        return scale

    def _shaped(self, node: Node, op: ShapeOp) -> CodeFormat:
        formats = [self._codes(name, node) for name in node.inputs]
        # What hands codes on hands the image's format on as it is, and its codes are not about zero.
        if isinstance(op, NewFormat) and any(form is self.values[INPUT] for form in formats):
            verb = "joins" if isinstance(op, Concat) else "averages"
            raise ProgramError(f"{node.name!r} {verb} the input image; put a convolution before it")
        step, target = shape_step(node, op, formats, self.graph.shapes[node.inputs[0]])
        self.steps.append(step)
        return target

    def _logits(self, value: _Value) -> str:
        if isinstance(value, FoldedProduct):
            scale = self._accumulate(value)
            name = f"{value.name}.logits"
            self.steps.append(Dequantize(name, value.name, scale))
            return name
        if isinstance(value, CodeFormat):
            name = f"{self.graph.output}.logits"
            self.steps.append(Dequantize(name, self.graph.output, np.asarray(value.scale, np.float32)))
            return name
        if isinstance(value, _Real):
            return value.name
        raise ProgramError(f"the output {self.graph.output!r} must be a layer, an addition or codes, no ReLU")


def _unchanged(node: Node, channels: int, codes: CodeFormat) -> FoldedProduct:
    """What a BatchNorm that reads codes is folded into."""
    layer = identity_layer(channels)
    op = Conv2d(channels, channels, (1, 1), (1, 1), (0, 0), (1, 1), channels, bias=False)
    scale = np.broadcast_to(layer.integer_scale(), (channels,)).astype(np.float32)
    return FoldedProduct(
        node.name, node.inputs[0], op, layer, codes, scale, offset=np.zeros(channels, np.float32)
    )


def _max_bias(product: FoldedProduct) -> float:
    """The greatest |bias_int| for which `acc + bias_int` fits an int32 whatever the codes."""
    longest = product.layer.codes[0].size * product.input.bound * 127
    return MAX_BIAS if longest < 2**30 else MAX_BIAS_OF_LONG_SUMS


def _finite(name: str, values: Vector) -> Vector:
    if not np.isfinite(values).all():
        raise ProgramError(
            f"the scales of {name!r} overflow float32; its side tensors or steps are far too large"
        )
    return values
