"""What a round takes of a board, worked out from the graph and the plan before anything is allocated.

Memory is an estimate from above: the buffers of a training step with the lives that the native engine gives
them (modules `native_step`, `arena`), the kernels' scratch memory, what is kept for each weight, and images.
Products are the multiplications of codes that the round cannot do without.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from fedmpq.exchange.messages import Phase, TrainingPlan
from fedmpq.model.calibration import CALIBRATION_SAMPLES
from fedmpq.model.graph import (
    INPUT,
    AdaptiveAvgPool,
    AvgPool,
    Conv2d,
    GlobalAvgPool,
    Graph,
    GraphError,
    Linear,
    MaxPool,
    Quantize,
)
from fedmpq.model.ops import Shape
from fedmpq.model.pools import windows_of
from fedmpq.model.task import CLASSIFICATION
from fedmpq.training.native_plan import (
    ConcatUnit,
    DropUnit,
    LookupUnit,
    MulUnit,
    NormUnit,
    PoolUnit,
    ProductUnit,
    RearrangeUnit,
    ScoreUnit,
    SumUnit,
    Unit,
    units_of,
    unlearnt_values,
    with_spare,
)

# Codes as received, twice unpacked and while they are trained, packed planes and payloads of both directions.
_BYTES_PER_WEIGHT = 8
# An accumulator, its float32 value, the rounded one and the codes of it.
_FORWARD_BYTES = 16
_LANES = 16


@dataclass(frozen=True)
class Needs:
    """What one round takes: bytes of memory beside the data set, and products of codes."""

    memory: int
    products: int


def training_needs(graph: Graph, plan: TrainingPlan, samples: int, threads: int) -> Needs:
    """Of the local training of a round."""
    batch = min(plan.batch_size, samples)
    try:
        step = step_memory(graph, units_of(graph), batch) + scratch_memory(graph, min(threads, batch))
    except GraphError:
        # Only the torch engine trains such a graph; it keeps all that a forward pass makes.
        step = _FORWARD_BYTES * batch * sum(math.prod(shape) for shape in graph.shapes.values())
    channels, height, width = graph.input.shape
    padded = batch * channels * (height + 2 * plan.pad) * (width + 2 * plan.pad)
    images = 2 * batch * math.prod(graph.input.shape) + (padded if plan.pad or plan.flip else 0)
    if graph.task != CLASSIFICATION:
        # What outputs are compared with, as floats, while it is made.
        images += 12 * batch * graph.shapes[graph.output][0]
    drawn = 64 * samples
    memory = step + images + drawn + weights_memory(graph, plan)
    # Forward; and where something is learnt, the errors of the inputs and the gradients of the weights.
    unlearnt = sum(_products(graph, node.name) for node in graph.nodes if node.name in graph.unlearnt)
    return Needs(memory, (3 * products_of(graph) - 2 * unlearnt) * samples * plan.epochs)


def forward_needs(graph: Graph, samples: int, batch: int, threads: int) -> Needs:
    """Of an evaluation or a calibration on `samples` images, `batch` at a time."""
    batch = min(batch, samples)
    live = _Lives()
    values = {INPUT: live.buffer(4 * batch * math.prod(graph.input.shape))}
    for node in graph.nodes:
        values[node.name] = live.buffer(_FORWARD_BYTES * batch * math.prod(graph.shapes[node.name]))
        live.use(values[node.name], *(values[name] for name in node.inputs))
    kept = _BYTES_PER_WEIGHT * sum(graph.layer_sizes)
    memory = live.peak() + scratch_memory(graph, min(threads, batch)) + kept
    return Needs(memory, products_of(graph) * samples)


def round_needs(
    graph: Graph, plan: TrainingPlan, phase: Phase, samples: int, evaluated: int, batch: int, threads: int
) -> Needs:
    """Of a round's phase, and of the evaluation of `evaluated` images, `batch` at a time."""
    # A board asks for the same in every round of a run, in which rates alone change.
    same = replace(plan, learning_rate=1.0, code_learning_rate=1.0)
    return _round_needs(graph, same, phase, samples, evaluated, batch, threads)


@lru_cache(maxsize=8)
def _round_needs(
    graph: Graph, plan: TrainingPlan, phase: Phase, samples: int, evaluated: int, batch: int, threads: int
) -> Needs:
    if phase == "calibration":
        needs = forward_needs(graph, min(samples, CALIBRATION_SAMPLES), plan.batch_size, threads)
    else:
        needs = training_needs(graph, plan, samples, threads)
    if not evaluated:
        return needs
    measured = forward_needs(graph, evaluated, batch, threads)
    return Needs(max(needs.memory, measured.memory), needs.products + measured.products)


def products_of(graph: Graph) -> int:
    """Products of one forward pass of one image; what a pool reads counts too."""
    return sum(_products(graph, node.name) for node in graph.nodes)


def _products(graph: Graph, name: str) -> int:
    node = graph.by_name[name]
    op, outputs = node.op, math.prod(graph.shapes[name])
    if isinstance(op, Conv2d | Linear):
        return outputs * math.prod(op.weight_shape[1:])
    if isinstance(op, MaxPool | AvgPool | GlobalAvgPool | AdaptiveAvgPool):
        source = graph.shapes[node.inputs[0]]
        return source[0] * windows_of(op, source).covered()
    return outputs


def weights_memory(graph: Graph, plan: TrainingPlan) -> int:
    """What a round keeps for each weight: codes, fractions of codes, momentum, planes in both directions."""
    momentum = {0: 0, 8: 2, 32: 4}[plan.momentum_bits if plan.momentum else 0]
    fractions = 1 if plan.update == "carried" else 0
    side = sum(math.prod(shape) for shape in graph.side_shapes().values())
    return (_BYTES_PER_WEIGHT + momentum + fractions) * sum(graph.layer_sizes) + 32 * side


def scratch_memory(graph: Graph, threads: int) -> int:
    """What the kernels allocate for one layer at a time: copies of an image, packed weights, their sums."""
    return max((_scratch(graph, node.name, threads) for node in graph.layers), default=0)


def _scratch(graph: Graph, name: str, threads: int) -> int:
    node = graph.by_name[name]
    op, source = node.op, graph.shapes[node.inputs[0]]
    assert isinstance(op, Conv2d | Linear)
    outputs = op.weight_shape[0] // (op.groups if isinstance(op, Conv2d) else 1)
    padded_weights = math.prod(op.weight_shape) // outputs * (-(-outputs // _LANES) * _LANES)
    copy = math.prod(source)
    if isinstance(op, Conv2d):
        spans = [d * (k - 1) for d, k in zip(op.dilation, op.kernel, strict=True)]
        sides = [n + 2 * p + span for n, p, span in zip(source[1:], op.padding, spans, strict=True)]
        # Errors come back to the pixels of one phase of the stride at a time, unless there is dilation.
        strides = [s if d == 1 else 1 for s, d in zip(op.stride, op.dilation, strict=True)]
        errors = [n // s + 1 + span for n, s, span in zip(source[1:], strides, spans, strict=True)]
        copy = max((op.in_channels + 3) * math.prod(sides), (op.out_channels + 3) * math.prod(errors))
    return threads * (4 * copy + 12 * padded_weights) + 10 * padded_weights


@dataclass
class _Buffer:
    size: int
    first: int = -1
    last: int = -1


@dataclass
class _Lives:
    """Buffers, each alive from the first moment of use to the last."""

    buffers: list[_Buffer] = field(default_factory=list)
    moment: int = 0

    def buffer(self, size: int) -> _Buffer:
        self.buffers.append(_Buffer(size))
        return self.buffers[-1]

    def use(self, *buffers: _Buffer) -> None:
        for each in buffers:
            each.first = self.moment if each.first < 0 else each.first
            each.last = self.moment
        self.moment += 1

    def peak(self) -> int:
        """The most bytes alive at one moment."""
        change = [0] * (self.moment + 1)
        for each in self.buffers:
            if each.first >= 0:
                change[each.first] += each.size
                change[each.last + 1] -= each.size
        most = live = 0
        for step in change:
            live += step
            most = max(most, live)
        return most


def step_memory(graph: Graph, units: Sequence[Unit], images: int) -> int:
    """Bytes of a training step's buffers, with those that it could do without."""
    return with_spare(_Step(graph, images).peak_of(units))


class _Step:
    """The buffers of a step, used in the order in which the units' calls use them."""

    def __init__(self, graph: Graph, images: int) -> None:
        self._graph, self._images = graph, images
        self._lives = _Lives()
        self._shapes = dict(graph.shapes)
        self._codes: dict[str, _Buffer] = {INPUT: self._lives.buffer(0)}
        self._bytes: dict[str, float] = {INPUT: 1.0}
        """Of a code: a half if it has four bits or fewer."""
        self._states: dict[str, _Buffer] = {}
        self._errors: dict[str, _Buffer] = {}
        self._unlearnt: set[str] = set()

    def peak_of(self, units: Sequence[Unit]) -> int:
        self._unlearnt = unlearnt_values(self._graph, units)
        for unit in units:
            self._forward(unit)
        for unit in reversed(units):
            if unit.output not in self._unlearnt:
                self._backward(unit)
        return self._lives.peak()

    def _size(self, name: str) -> int:
        return self._images * math.prod(self._shape(name))

    def _shape(self, name: str) -> Shape:
        # The logits that are codes are no value of the graph.
        return self._shapes.get(name, self._shapes[self._graph.output])

    def _forward(self, unit: Unit) -> None:
        lives, sources = self._lives, [self._codes[name] for name in unit.sources]
        if isinstance(unit, DropUnit):
            self._shapes[unit.output] = self._shapes[unit.source]
        self._bytes[unit.output] = self._bytes_of(unit)
        codes = self._codes[unit.output] = lives.buffer(
            math.ceil(self._size(unit.output) * self._bytes[unit.output])
        )
        if isinstance(unit, ProductUnit):
            sums = lives.buffer(4 * self._size(unit.node.name))
            lives.use(*sources, sums)
            lives.use(sums, codes)
        elif isinstance(unit, SumUnit):
            states = self._states[unit.output] = lives.buffer(self._size(unit.output) // 4)
            lives.use(*sources, states, codes)
        elif isinstance(unit, NormUnit):
            sums = lives.buffer(4 * self._size(unit.output))
            lives.use(*sources, sums, codes)
        else:
            lives.use(*sources, codes)

    def _bytes_of(self, unit: Unit) -> float:
        if isinstance(unit, ScoreUnit):
            return 8.0
        if isinstance(unit, ProductUnit | NormUnit | SumUnit | MulUnit | LookupUnit):
            quantizer = unit.quantizer
            return 4.0 if quantizer is None else _code_bytes(quantizer.op)
        averages = isinstance(unit, PoolUnit) and not unit.takes_greatest
        return 1.0 if averages or len(unit.sources) > 1 else self._bytes[unit.sources[0]]

    def _backward(self, unit: Unit) -> None:
        lives = self._lives
        error = self._errors.pop(unit.output, None) or lives.buffer(2 * self._size(unit.output))
        if isinstance(unit, ProductUnit):
            self._backward_product(unit, error)
            return
        used = [error, *(self._states[unit.output] for _ in (0,) if isinstance(unit, SumUnit))]
        if isinstance(unit, LookupUnit | MulUnit | DropUnit) and unit.sources[0] not in self._unlearnt:
            # The error is passed on in place, unless there is one to which it is added.
            self._errors.setdefault(unit.sources[0], error)
        if isinstance(unit, NormUnit):
            used.append(lives.buffer(4 * self._size(unit.output)))
            if unit.source not in self._unlearnt:
                # What it passes on lies where its own error lay.
                self._errors.setdefault(unit.source, error)
        for source in unit.sources:
            own = self._error_of(source)
            moves = isinstance(unit, SumUnit | ConcatUnit | RearrangeUnit | DropUnit)
            kept = [] if moves else [self._codes[source]]
            lives.use(*used, *kept, own)

    def _error_of(self, name: str) -> _Buffer:
        if name in self._unlearnt:
            return self._lives.buffer(0)
        if name not in self._errors:
            self._errors[name] = self._lives.buffer(2 * self._size(name))
        return self._errors[name]

    def _backward_product(self, unit: ProductUnit, error: _Buffer) -> None:
        lives, source = self._lives, self._codes[unit.source]
        outputs = self._size(unit.node.name)
        sums, rounded = lives.buffer(4 * outputs), lives.buffer(outputs)
        gradient = lives.buffer(4 * math.prod(unit.op.weight_shape))
        lives.use(source, error, sums)
        lives.use(error, sums)
        lives.use(error, rounded)
        lives.use(rounded, self._error_of(unit.source))
        lives.use(rounded, source, gradient)


def _code_bytes(op: Quantize) -> float:
    return 0.5 if op.bits <= 4 else 1.0
