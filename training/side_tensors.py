"""Side tensors in training: all that are learnt lie in one vector, so that an update is a few operations.

SGD with momentum `mu` and coupled weight decay `lambda`: `v <- mu * v + (gradient + lambda * value)` (without
the first term in the first step) and `value <- value - eta * v`. A clip stays at least `MIN_CLIP`, and one at
or above the bound of the ReLU before it has no gradient: there the bound clips.

Running statistics, the same way: `held <- held + m * (new - held)` with BatchNorm's `m`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from ctypes import c_float

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.activations import MIN_CLIP, code_bounds
from fedmpq.model.graph import BatchNorm, Node
from fedmpq.model.quantized import Side
from fedmpq.training.native_plan import LookupUnit, MulUnit, NormUnit, ProductUnit, Quantizer, SumUnit, Unit

Vector = NDArray[np.float32]


class NotFinite(ArithmeticError):
    """Something that must be finite is not; says what."""


def all_finite(values: NDArray[np.float32] | NDArray[np.float64]) -> bool:
    """Whether every number of the vector is finite."""
    # A sum of finite numbers may overflow, so only one that is not finite is worth a closer look.
    return math.isfinite(np.add.reduce(values)) or bool(np.isfinite(values).all())


class SideTensors:
    """Clips, biases and BatchNorm's gamma and beta, with a gradient each; and running statistics."""

    def __init__(
        self, side: Side, units: Iterable[Unit], plan: TrainingPlan, frozen: Collection[str] = ()
    ) -> None:
        products = [unit for unit in units if isinstance(unit, ProductUnit | NormUnit)]
        rounding = ProductUnit | NormUnit | SumUnit | MulUnit | LookupUnit
        quantized = [unit for unit in units if isinstance(unit, rounding)]
        self.quantizers = [unit.quantizer for unit in quantized if unit.quantizer is not None]
        self._shapes = {name: tensor.shape for name, tensor in side.items()}
        self.places = _places(side, [*map(clip_of, self.quantizers), *_learnt(products)])
        self.values = np.zeros(_length(self.places), np.float32)
        self.gradients = np.zeros_like(self.values)
        self._frozen = [self.places[name] for name in frozen if name in self.places]
        self._bounds, self._highs = _limits(self.quantizers)
        self._scales = np.zeros_like(self._highs)
        norms = [unit.norm for unit in products if unit.norm is not None]
        self.running_places = _places(side, [f"{n.name}.{part}" for part in _RUNNING for n in norms])
        self._running = np.zeros(_length(self.running_places), np.float32)
        weights = [_momentum_of(n) for _ in _RUNNING for n in norms]
        sizes = [place.stop - place.start for place in self.running_places.values()]
        self._running_weights = np.repeat(np.array(weights, np.float32), sizes)
        self.load(side, plan)

    def load(self, side: Side, plan: TrainingPlan) -> None:
        """Take other values of the same tensors, where the ones before were; momentum starts at zero."""
        self._plan = plan
        self._momentum: Vector | None = None
        self.gradients[...] = 0.0
        for places, vector in ((self.places, self.values), (self.running_places, self._running)):
            for name, place in places.items():
                vector[place] = side[name].reshape(-1)

    def tensors(self) -> Side:
        """Copies, by name, in the order in which they came."""
        found = {}
        for name, shape in self._shapes.items():
            learnt = name in self.places
            vector = self.values if learnt else self._running
            place = self.places[name] if learnt else self.running_places[name]
            found[name] = vector[place].reshape(shape).copy()
        return found

    @property
    def statistics(self) -> int:
        """How many running statistics there are."""
        return len(self._running)

    def find_scales(self) -> None:
        """Of the codes behind each quantizer: `min(max(clip, MIN_CLIP), bound) / greatest code`."""
        clips = np.minimum(np.maximum(self._clips, MIN_CLIP), self._bounds)
        np.divide(clips, self._highs, self._scales)

    def scale_of(self, quantizer: Quantizer) -> c_float:
        """Where `find_scales` puts the scale of the codes behind a quantizer."""
        number = self.quantizers.index(quantizer)
        return c_float.from_buffer(self._scales.data, number * self._scales.itemsize)

    def clip_gradient(self, quantizer: Quantizer) -> Vector:
        """Where the gradient of a quantizer's clip goes: one element."""
        gradient: Vector = self.gradients[self.places[clip_of(quantizer)]]
        return gradient

    def update(self) -> None:
        """One step against the gradients."""
        plan = self._plan
        self._stop_at_bounds()
        direction = np.float32(plan.weight_decay) * self.values
        direction += self.gradients
        for place in self._frozen:
            direction[place] = 0.0
        if plan.momentum and self._momentum is not None:
            self._momentum *= np.float32(plan.momentum)
            direction += self._momentum
        if plan.momentum:
            self._momentum = direction
        self._require_finite("the gradient of", direction, self.places)
        self.values -= np.float32(plan.learning_rate) * direction
        self._require_finite("the side tensor", self.values, self.places)
        np.maximum(self._clips, MIN_CLIP, out=self._clips)

    def _stop_at_bounds(self) -> None:
        self.gradients[: len(self._bounds)][self._bounds <= self._clips] = 0.0

    def track(self, statistics: NDArray[np.float64]) -> None:
        """Means and variances of a batch, laid out by `running_places`."""
        moves = statistics.astype(np.float32)
        moves -= self._running
        moves *= self._running_weights
        self._running += moves
        self._require_finite("the side tensor", self._running, self.running_places)

    @property
    def _clips(self) -> Vector:
        return self.values[: len(self._bounds)]

    def _require_finite(self, what: str, vector: Vector, places: Mapping[str, slice]) -> None:
        if all_finite(vector):
            return
        for name, place in places.items():
            if not np.isfinite(vector[place]).all():
                raise NotFinite(f"{what} {name!r} is not finite")


_RUNNING = ("running_mean", "running_var")


def clip_of(quantizer: Quantizer) -> str:
    """The name of its side tensor."""
    return f"{quantizer.name}.clip"


def _learnt(products: Iterable[ProductUnit | NormUnit]) -> list[str]:
    names = []
    for unit in products:
        names += [f"{unit.norm.name}.weight", f"{unit.norm.name}.bias"] if unit.norm is not None else []
        names += [f"{unit.node.name}.bias"] if isinstance(unit, ProductUnit) and unit.op.bias else []
    return names


def _places(side: Side, names: list[str]) -> dict[str, slice]:
    """Where each lies in a vector of all of them."""
    ends = np.cumsum([side[name].size for name in names]).tolist()
    return {name: slice(end - side[name].size, end) for name, end in zip(names, ends, strict=True)}


def _length(places: Mapping[str, slice]) -> int:
    """Of a vector with these places."""
    return max((place.stop for place in places.values()), default=0)


def _limits(quantizers: list[Quantizer]) -> tuple[Vector, Vector]:
    """The bounds of the ReLUs before them, and their greatest codes."""
    bounds = [each.maximum if each.maximum > 0 else math.inf for each in quantizers]
    highs = [code_bounds(each.op.bits, each.op.signed)[1] for each in quantizers]
    return np.array(bounds, np.float32), np.array(highs, np.float32)


def _momentum_of(norm: Node) -> float:
    assert isinstance(norm.op, BatchNorm)
    return norm.op.momentum
