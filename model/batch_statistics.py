"""BatchNorm statistics of a quantized model, worked out without data.

Running statistics are those of the weights that were trained with. At few bits the quantized weights `Q` are
another filter than `W`, and evaluation with `W`'s statistics goes astray layer by layer. What the difference
does to the mean and variance of a layer's output follows from the moments of its input, and those BatchNorm
itself tells: it gives mean `beta` and variance `gamma^2` in every channel, whatever it reads. With `E_c` and
`V_c` the moments of input channel `c`, taps in the padding left out of the mean, and per output channel

    g = sum(Q W V) / sum(W W V)          how much of W is in Q
    mean' = mean + sum((Q - W) E)
    var'  = g^2 var + sum((Q - g W)^2 V)

A BatchNorm that reads codes, such as a concatenation's, has its statistics moved by as much as those moments
move: `mean' = mean + E' - E`, `var' = var V' / V`.

The rest `Q - g W` is rounding noise: its taps are taken to be independent of one another. Activations are
taken to be clipped normal variables, and the two terms of a residual sum, or factors of a product, to
be independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.activations import effective_clip
from fedmpq.model.graph import (
    INPUT,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    BatchNorm,
    ChannelShuffle,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    Linear,
    Lookup,
    MaxPool,
    Mul,
    Node,
    Pad,
    Quantize,
    Relu,
    Slice,
    Upsample,
)
from fedmpq.model.never import assert_never
from fedmpq.model.ops import ShapeOp
from fedmpq.model.pointwise import evaluated
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.quantizers import bound_before
from fedmpq.model.rearrangements import channels_of

Vector = NDArray[np.float64]
_LEAST = 1e-30
_UNBOUNDED = 1e9
_LEAST_SHARE = 0.05
# Where a function of a normal variable is evaluated, in deviations from its mean.
_DEVIATIONS = np.linspace(-5.0, 5.0, 101)


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a value, one of each per channel."""

    mean: Vector
    variance: Vector

    def clipped(self, low: float, high: float) -> Moments:
        """The moments of `min(max(x, low), high)`, where `x` is normal and has these."""
        deviation = np.sqrt(np.maximum(self.variance, _LEAST))
        a, b = (low - self.mean) / deviation, (high - self.mean) / deviation
        below, above = _share_below(a), 1 - _share_below(b)
        inside = 1 - below - above
        at_low, at_high = _density(a), _density(b)
        first = self.mean * inside + deviation * (at_low - at_high)
        second = (self.mean**2 + deviation**2) * inside
        second += deviation * ((low + self.mean) * at_low - (high + self.mean) * at_high)
        mean = low * below + high * above + first
        square = low**2 * below + high**2 * above + second
        return Moments(mean, np.maximum(square - mean**2, 0.0))

    def through(self, op: Lookup) -> Moments:
        """The moments of the function's value, where its argument is normal and has these."""
        shares = _density(_DEVIATIONS)
        shares /= shares.sum()
        points = self.mean[:, None] + np.sqrt(np.maximum(self.variance, 0.0))[:, None] * _DEVIATIONS
        values, _ = evaluated(op.function, op.parameter, points)
        mean = (values * shares).sum(axis=1)
        square = (np.square(values) * shares).sum(axis=1)
        return Moments(mean, np.maximum(square - np.square(mean), 0.0))

    def times(self, other: Moments) -> Moments:
        """The moments of the product of two independent variables."""
        spread = self.variance * other.variance
        spread += np.square(self.mean) * other.variance + np.square(other.mean) * self.variance
        return Moments(self.mean * other.mean, spread)


def quantized_statistics(graph: Graph, weights: Weights, quantized: Weights, side: Side) -> Side:
    """The side tensors with every BatchNorm's running statistics moved from `weights` to `quantized`."""
    moved = dict(side)
    for move in _moves(graph, weights, quantized, side):
        moved[move.mean] = (side[move.mean] + move.shift).astype(np.float32)
        moved[move.variance] = (np.square(move.gain) * side[move.variance] + move.noise).astype(np.float32)
    return moved


def unquantized_statistics(graph: Graph, weights: Weights, quantized: Weights, side: Side) -> Side:
    """The reverse: statistics of `quantized` moved to `weights`, so that moving them on gives them back.

    What was measured may be less than the noise is taken to be; at least `_LEAST_SHARE` of it stays.
    """
    moved = dict(side)
    for move in _moves(graph, weights, quantized, side):
        measured = side[move.variance].astype(np.float64)
        kept = np.maximum(measured - move.noise, _LEAST_SHARE * measured)
        moved[move.mean] = (side[move.mean] - move.shift).astype(np.float32)
        moved[move.variance] = (kept / np.maximum(np.square(move.gain), _LEAST_SHARE)).astype(np.float32)
    return moved


@dataclass(frozen=True)
class _Move:
    """What quantizing does to the statistics of one BatchNorm, and their names."""

    mean: str
    variance: str
    shift: Vector
    gain: Vector
    noise: Vector


def _moves(graph: Graph, weights: Weights, quantized: Weights, side: Side) -> Iterator[_Move]:
    moments = _Moments(graph, weights, side)
    for node in graph.layers:
        readers = graph.consumers[node.name]
        if len(readers) != 1 or not isinstance(graph.by_name[readers[0]].op, BatchNorm):
            continue
        old, new = (tensors[node.name].astype(np.float64) for tensors in (weights, quantized))
        means, variances = moments.of_taps(node)
        axes = tuple(range(1, old.ndim))
        gain = _gain((new * old * variances).sum(axes), (old * old * variances).sum(axes))
        noise = np.square(new - gain.reshape(-1, *(1,) * len(axes)) * old) * variances
        mean, variance = f"{readers[0]}.running_mean", f"{readers[0]}.running_var"
        yield _Move(mean, variance, ((new - old) * means).sum(axes), gain, noise.sum(axes))
    of_codes = [node for node in graph.nodes if isinstance(node.op, BatchNorm) and not graph.folds(node)]
    if of_codes:
        yield from _moves_of_codes(of_codes, moments, _Moments(graph, quantized, side))


def _moves_of_codes(norms: list[Node], old: _Moments, new: _Moments) -> Iterator[_Move]:
    """Those of BatchNorms that read codes: as the moments of what they read move, noise and all."""
    for node in norms:
        before, after = old.of(node.inputs[0]), new.of(node.inputs[0])
        gain = np.sqrt(_gain(after.variance, before.variance))
        mean, variance = f"{node.name}.running_mean", f"{node.name}.running_var"
        yield _Move(mean, variance, after.mean - before.mean, gain, np.zeros_like(gain))


def _gain(common: Vector, power: Vector) -> Vector:
    """`common / power`, and 1 where the power is zero, which keeps the variance as it is."""
    return np.divide(common, power, out=np.ones_like(power), where=power > _LEAST)


class _Moments:
    """The moments of every value of a graph that a layer may read."""

    def __init__(self, graph: Graph, weights: Weights, side: Side) -> None:
        self._graph = graph
        self._weights = weights
        self._side = side
        channels = graph.input.channels
        # The input's scale and zero point are chosen so that pixels have mean 0 and variance 1.
        self._of = {INPUT: Moments(np.zeros(channels), np.ones(channels))}
        for node in graph.nodes:
            if not isinstance(node.op, Conv2d | Linear):
                self._of[node.name] = self._given_by(node)

    def of(self, name: str) -> Moments:
        """Of the value called `name`; a layer's are worked out when they are asked for, which a BatchNorm
        behind it does not do."""
        if name not in self._of:
            self._of[name] = self._given_by(self._graph.by_name[name])
        return self._of[name]

    def of_taps(self, node: Node) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and variance of what each weight of a layer is multiplied by, in the weight's shape."""
        source, op = self.of(node.inputs[0]), node.op
        if isinstance(op, Linear):
            mean, variance = (np.broadcast_to(m, op.weight_shape) for m in (source.mean, source.variance))
            return mean, variance
        assert isinstance(op, Conv2d), f"{node.name!r} is no layer"
        outputs, inputs = op.weight_shape[:2]
        # By output, of which there is one for all of them where they read the same channels.
        group = np.arange(outputs if op.groups > 1 else 1) // (outputs // op.groups)
        channel = group[:, None] * inputs + np.arange(inputs)
        inside = _share_inside(self._graph, node)
        shape = op.weight_shape
        means = np.broadcast_to(source.mean[channel][:, :, None, None] * inside, shape)
        return means, np.broadcast_to(source.variance[channel][:, :, None, None], shape)

    def _given_by(self, node: Node) -> Moments:
        op = node.op
        if isinstance(op, Conv2d | Linear):
            return self._given_by_layer(node)
        if isinstance(op, BatchNorm):
            gamma, beta = (self._side[f"{node.name}.{part}"] for part in ("weight", "bias"))
            return Moments(beta.astype(np.float64), np.square(gamma, dtype=np.float64))
        source = self.of(node.inputs[0])
        if isinstance(op, Relu):
            return source.clipped(0.0, op.maximum or _UNBOUNDED)
        if isinstance(op, Quantize):
            return self._given_by_quantizer(node, op)
        if isinstance(op, Add):
            other = self.of(node.inputs[1])
            return Moments(source.mean + other.mean, source.variance + other.variance)
        if isinstance(op, Mul):
            return source.times(self.of(node.inputs[1]))
        if isinstance(op, Lookup):
            return source.through(op)
        if isinstance(op, ShapeOp):
            return self._given_by_shape(node, op)
        assert_never(op)

    def _given_by_shape(self, node: Node, op: ShapeOp) -> Moments:
        source = self.of(node.inputs[0])
        if isinstance(op, Flatten):
            copies = math.prod(self._graph.shapes[node.inputs[0]][1:])
            return Moments(source.mean.repeat(copies), source.variance.repeat(copies))
        if isinstance(op, Concat):
            joined = [self.of(name) for name in node.inputs]
            means, variances = zip(*((each.mean, each.variance) for each in joined), strict=True)
            return Moments(np.concatenate(means), np.concatenate(variances))
        if isinstance(op, Slice | ChannelShuffle | Pad | Upsample):
            chosen = channels_of(op, len(source.mean))
            return Moments(source.mean[chosen], source.variance[chosen])
        if isinstance(op, MaxPool | AvgPool | GlobalAvgPool | AdaptiveAvgPool):
            return source  # neighbours are alike: their mean or greatest is taken to be as any of them
        assert_never(op)

    def _given_by_layer(self, node: Node) -> Moments:
        weights = self._weights[node.name].astype(np.float64)
        means, variances = self.of_taps(node)
        axes = tuple(range(1, weights.ndim))
        bias = self._side.get(f"{node.name}.bias", np.float32(0))
        return Moments((weights * means).sum(axes) + bias, (np.square(weights) * variances).sum(axes))

    def _given_by_quantizer(self, node: Node, op: Quantize) -> Moments:
        """A ReLU in front and the quantizer's clip cut the same normal variable once."""
        before = self._graph.by_name.get(node.inputs[0])
        relu = before.op if before is not None and isinstance(before.op, Relu) else None
        source = self.of(before.inputs[0] if before is not None and relu is not None else node.inputs[0])
        learnt = np.float32(self._side[f"{node.name}.clip"])
        clip = float(effective_clip(learnt, bound_before(self._graph, node)))
        return source.clipped(-clip if op.signed else 0.0, clip)


def _share_inside(graph: Graph, node: Node) -> NDArray[np.float64]:
    """For each tap of a convolution, the share of output positions where it is not on padding."""
    op = node.op
    assert isinstance(op, Conv2d)
    rows, columns = (
        _inside_along(
            graph.shapes[node.inputs[0]][1 + i],
            graph.shapes[node.name][1 + i],
            op.kernel[i],
            op.stride[i],
            op.padding[i],
            op.dilation[i],
        )
        for i in (0, 1)
    )
    return rows[:, None] * columns


@lru_cache(maxsize=256)
def _inside_along(size: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int) -> Vector:
    taps = np.arange(kernel)[:, None] * dilation - padding
    positions = np.arange(outputs) * stride + taps
    inside = np.asarray(((positions >= 0) & (positions < size)).mean(axis=1), dtype=np.float64)
    inside.setflags(write=False)
    return inside


_erf = np.frompyfunc(math.erf, 1, 1)


def _share_below(x: Vector) -> Vector:
    """The probability that a standard normal variable is below `x`."""
    return 0.5 * (1 + np.asarray(_erf(x / math.sqrt(2)), dtype=np.float64))


def _density(x: Vector) -> Vector:
    return np.asarray(np.exp(-0.5 * np.square(x)) / math.sqrt(2 * math.pi), dtype=np.float64)
