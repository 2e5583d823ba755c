"""How the units of a graph are bound to a batch size, so that a step is a list of calls made ready before.

A unit goes through three phases, each a value that the one before returns: `ForwardUnit`, `BoundUnit`,
`StepUnit`. Units are bound forward in the order of the graph and backward in the reverse order, which tells
the layout (module `arena`) when each buffer is in use. Then buffers get their places, and from there on only
numbers change from step to step: a step is the actions of its units, most of them calls of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float, c_uint32
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.kernels.memory import Buffer
from fedmpq.kernels.program import Action
from fedmpq.kernels.tensors import StoredCodes
from fedmpq.model.activations import CodeFormat, code_bounds
from fedmpq.model.task import Task
from fedmpq.training.arena import Layout, StepBuffer
from fedmpq.training.client_draws import ClientDraws
from fedmpq.training.engine import Shift
from fedmpq.training.native_layer import TrainedLayer
from fedmpq.training.native_plan import Quantizer
from fedmpq.training.side_tensors import SideTensors

Shape = tuple[int, int, int]

_SUM_ROWS = 4


def single(value: float) -> float:
    """`value` rounded to the nearest float32.

    A product or quotient of two float32 numbers that is computed in double precision and then rounded is the
    one that float32 arithmetic gives: 53 bits are enough for that (at least 2 * 24 + 2).
    """
    return c_float(value).value


@dataclass
class Tensor:
    """A batch of codes between units; `shape` is (channels, height, width), channels are stored last."""

    buffer: Buffer
    low: int
    high: int
    images: int
    shape: Shape
    number: c_float = field(default_factory=c_float)
    """The scale, as calls read it."""

    @property
    def scale(self) -> float:
        """The real value is `scale * code`, in the step under way; a float32."""
        return self.number.value

    @scale.setter
    def scale(self, value: float) -> None:
        self.number.value = value

    @property
    def codes(self) -> StoredCodes:
        return StoredCodes(self.buffer, self.pairs, -self.low)

    @property
    def pairs(self) -> bool:
        return self.high - self.low <= 15

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def form(self) -> CodeFormat:
        """What the codes mean in the step under way."""
        return CodeFormat(np.float32(self.scale), self.low, self.high)

    def unpaired(self) -> NDArray[np.uint8]:
        """The stored codes, a byte each, a row for each image."""
        rows: NDArray[np.uint8] = self.buffer.array.reshape(self.images, -1)
        if not self.pairs:
            return rows
        return np.stack((rows & 15, rows >> 4), axis=2).reshape(self.images, -1)[:, : self.elements]


class Scratch:
    """Doubles that the layers of a step use in turn, rows of one number per channel."""

    def __init__(self, layout: Layout, channels: int) -> None:
        self.sums = layout.buffer(_SUM_ROWS * channels, np.float64)
        """What kernels add up."""


@dataclass
class Binding:
    """What the units of a step share, and what has been bound so far."""

    layers: dict[str, TrainedLayer]
    side: SideTensors
    draws: ClientDraws
    threads: int
    float_errors: bool
    step: c_uint32
    """The number of the step under way."""
    task: Task
    shift: Shift
    """What the loss of classes adds to their logits (`label_prior`)."""
    answers: Buffer
    """What the batch's outputs are compared with."""
    layout: Layout
    scratch: Scratch
    statistics: StepBuffer
    """Means and variances of the batch, by `SideTensors.running_places`."""
    unlearnt: set[str]
    """Values that have no errors, because nothing is learnt before them."""
    tensors: dict[str, Tensor]
    errors: dict[str, Buffer] = field(default_factory=dict)
    """The errors of values that something bound so far makes."""
    sparing: set[str] = field(default_factory=set)
    """Values whose unit leaves their error as it is if that is another value's too."""

    def bind(self, call: Call, subject: str = "") -> Call:
        """Make `call` the next; `subject` is what it finds not to be finite, if it does."""
        self.layout.use(*call.buffers)
        call.subject = subject
        return call

    def quantized_tensor(self, images: int, shape: Shape, quantizer: Quantizer) -> Tensor:
        """Codes behind a quantizer, whose clip gives their scale."""
        bounds = code_bounds(quantizer.op.bits, quantizer.op.signed)
        return self.new_tensor(images, shape, *bounds, self.side.scale_of(quantizer))

    def new_tensor(
        self, images: int, shape: Shape, low: int, high: int, number: c_float | None = None
    ) -> Tensor:
        """`number` is the scale, if it is another's too."""
        scale = c_float() if number is None else number
        tensor = Tensor(Buffer(0, np.uint8), low, high, images, shape, scale)
        size = StoredCodes.nbytes(images, tensor.elements, tensor.pairs)
        tensor.buffer = self.layout.buffer(size, np.uint8)
        return tensor

    def error_of(self, name: str, tensor: Tensor) -> tuple[Buffer, bool]:
        """Where errors of the value go, and whether some are there already, to which they must be added."""
        known = name in self.errors
        if not known:
            self.errors[name] = self.layout.buffer(tensor.images * tensor.elements, np.uint16)
        return self.errors[name], known

    def deliver(self, name: str, error: Buffer) -> Call | None:
        """Take `error` as that of the value `name`; if it has one already, the call that adds the two."""
        if name in self.errors:
            return self.bind(bound.add_errors(error, error.count, self.errors[name]))
        if name not in self.unlearnt:
            self.errors[name] = error
        return None


class ForwardUnit(Protocol):
    """The first phase of a unit: its forward calls are bound to a batch size."""

    def bind_backward(self, binding: Binding) -> BoundUnit: ...

    def forward_only(self) -> BoundUnit:
        """The unit where nothing is learnt in it and before it; its `backward` must not be called."""


class BoundUnit(Protocol):
    """The second phase: calls of both directions are bound, but their buffers have no places yet."""

    def settle(self, scratch: Scratch) -> StepUnit:
        """Take hold of the buffers' arrays, once they have places."""


class StepUnit:
    """The last phase: what a unit does in every step, forward and backward."""

    forward: Sequence[Action] = ()
    backward: Sequence[Action] = ()

    def prepare(self) -> None:
        """Find what follows from scales alone, its own output's for one. Happens before anything runs, unit
        after unit."""
