"""A training step of the native engine, bound to a batch size."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float, c_uint32

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.memory import Buffer
from fedmpq.kernels.program import Program, in_one_go
from fedmpq.model.graph import INPUT, BatchNorm, Conv2d, Graph, Linear
from fedmpq.model.never import assert_never
from fedmpq.model.task import Answers
from fedmpq.training.arena import Layout
from fedmpq.training.binding import Binding, ForwardUnit, Scratch, Tensor
from fedmpq.training.client_draws import ClientDraws
from fedmpq.training.dropout_units import DropForward
from fedmpq.training.engine import Shift
from fedmpq.training.lookup_units import LookupForward
from fedmpq.training.losses import answer_buffer
from fedmpq.training.multiply_units import MulForward
from fedmpq.training.native_layer import TrainedLayer
from fedmpq.training.native_plan import (
    ConcatUnit,
    DropUnit,
    FlattenUnit,
    LookupUnit,
    MulUnit,
    NormUnit,
    PoolUnit,
    ProductUnit,
    RearrangeUnit,
    ScoreUnit,
    ShapeUnit,
    SumUnit,
    Unit,
    unlearnt_values,
)
from fedmpq.training.norm_units import NormForward
from fedmpq.training.pool_units import FlattenForward, PoolForward
from fedmpq.training.product_units import Logits, LogitsForward, ProductForward
from fedmpq.training.score_units import Scores, ScoresForward
from fedmpq.training.shape_units import ConcatForward, RearrangeForward
from fedmpq.training.side_tensors import SideTensors
from fedmpq.training.sum_units import SumForward


class BoundStep:
    """A step on so many images whose calls are bound; `layout` says how much memory it needs."""

    def __init__(
        self,
        graph: Graph,
        units: Sequence[Unit],
        images: int,
        layers: dict[str, TrainedLayer],
        side: SideTensors,
        shift: Shift,
        draws: ClientDraws,
        threads: int,
        float_errors: bool,
    ) -> None:
        self.layout = layout = Layout()
        self.side = side
        self.number = c_uint32()
        """The number of the step under way."""
        self.image = _image(graph, images)
        self.answers = answer_buffer(graph, images)
        self.scratch = Scratch(layout, _most_channels(graph))
        self.statistics = layout.buffer(side.statistics, np.float64)
        binding = Binding(
            layers=layers,
            side=side,
            draws=draws,
            threads=threads,
            float_errors=float_errors,
            step=self.number,
            task=graph.task,
            shift=shift,
            answers=self.answers,
            layout=layout,
            scratch=self.scratch,
            statistics=self.statistics,
            tensors={INPUT: self.image},
            unlearnt=unlearnt_values(graph, units),
        )
        forward = [_bound(unit, binding) for unit in units]
        layout.use(self.statistics)
        self.learns = [unit.output not in binding.unlearnt for unit in units]
        """Which of them run backward too."""
        backward = [
            unit.bind_backward(binding) if learns else unit.forward_only()
            for unit, learns in zip(reversed(forward), reversed(self.learns), strict=True)
        ]
        self.units = tuple(reversed(backward))

    def put_into(self, block: NDArray[np.uint8]) -> NativeStep:
        """The step with its buffers in `block`, once `layout` has chosen their places."""
        self.layout.put_into(block)
        return NativeStep(self)


class NativeStep:
    """One training step on so many images, ready to run."""

    def __init__(self, bound: BoundStep) -> None:
        self._bound = bound
        self._units = [unit.settle(bound.scratch) for unit in bound.units]
        self._learning = [unit for unit, learns in zip(self._units, bound.learns, strict=True) if learns]
        self._logits = next(unit for unit in self._units if isinstance(unit, Logits | Scores))
        self.arrange()

    def arrange(self) -> None:
        """Make the units' actions two lists, in which kernels that follow one another run in one go."""
        backward = reversed(self._learning)
        self._forward = in_one_go(action for unit in self._units for action in unit.forward)
        self._backward = in_one_go(action for unit in backward for action in unit.backward)

    @property
    def programs(self) -> list[Program]:
        """For measurements."""
        return [each for each in (*self._forward, *self._backward) if isinstance(each, Program)]

    def run(self, number: int, images: NDArray[np.uint8], answers: Answers) -> tuple[float, int]:
        """Train on a batch; its mean loss, and how many answers were right."""
        bound = self._bound
        bound.number.value = number
        bound.image.buffer.put(np.ascontiguousarray(images).reshape(-1))
        bound.answers.put(np.ascontiguousarray(answers).reshape(-1))
        try:
            bound.side.find_scales()
            for unit in self._units:
                unit.prepare()
            for act in self._forward:
                act()
            bound.side.track(bound.statistics.array)
            for act in self._backward:
                act()
            bound.side.update()
        finally:
            bound.image.buffer.drop()
            bound.answers.drop()
        return self._logits.loss, self._logits.right


def _most_channels(graph: Graph) -> int:
    """Of a layer or a BatchNorm: what sums over channels are at most."""
    kinds = Conv2d | Linear | BatchNorm
    return max(graph.shapes[node.name][0] for node in graph.nodes if isinstance(node.op, kinds))


def _image(graph: Graph, images: int) -> Tensor:
    """The input: pixels are codes."""
    image = graph.input
    channels, height, width = image.shape
    pixels = Buffer(images * channels * height * width, np.uint8)
    low, high = -image.zero_point, 255 - image.zero_point
    scale = float(np.float32(image.scale))
    return Tensor(pixels, low, high, images, (channels, height, width), c_float(scale))


def _bound(unit: Unit, binding: Binding) -> ForwardUnit:
    if isinstance(unit, ProductUnit):
        if unit.quantizer is None:
            return LogitsForward.bind(unit, binding)
        return ProductForward.bind(unit, unit.quantizer, binding)
    if isinstance(unit, NormUnit):
        return NormForward.bind(unit, binding)
    if isinstance(unit, SumUnit):
        return SumForward.bind(unit, binding)
    if isinstance(unit, MulUnit):
        return MulForward.bind(unit, binding)
    if isinstance(unit, LookupUnit):
        return LookupForward.bind(unit, binding)
    if isinstance(unit, ScoreUnit):
        return ScoresForward.bind(unit, binding)
    return _shape_bound(unit, binding)


def _shape_bound(unit: ShapeUnit, binding: Binding) -> ForwardUnit:
    if isinstance(unit, PoolUnit):
        return PoolForward.bind(unit, binding)
    if isinstance(unit, FlattenUnit):
        return FlattenForward.bind(unit, binding)
    if isinstance(unit, ConcatUnit):
        return ConcatForward.bind(unit, binding)
    if isinstance(unit, RearrangeUnit):
        return RearrangeForward.bind(unit, binding)
    if isinstance(unit, DropUnit):
        return DropForward.bind(unit, binding)
    assert_never(unit)
