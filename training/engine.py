"""The seam between local training and the arithmetic that does it.

An engine holds one quantized model and trains it in place. Integers are the only weights that persist between
steps: the codes and, under the carried rule, 256ths of a code beside them. Engines agree to the bit on
integer accumulators and on the code update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.change import Fractions
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.randomness import Draws
from fedmpq.model.task import Answers

Batch = tuple[NDArray[np.uint8], Answers]
"""Images `(N, H, W, C)` and what they are to give: labels `(N,)`, or targets `(N, outputs)`.

A model that reconstructs its input compares with the images themselves, whatever comes with them."""


Shift = NDArray[np.float32]
"""A number for each class."""


class TrainingError(RuntimeError):
    """Training that cannot go on, such as a loss that is not a number."""


class WorkStopped(Exception):
    """The round was called off."""


class EngineError(RuntimeError):
    """An engine that does not exist or cannot be loaded here."""


@dataclass(frozen=True)
class EpochResult:
    """Means over the samples of one epoch, each measured before its batch's update."""

    samples: int
    loss: float
    accuracy: float
    """The share of right classes or labels; 0 where answers are values, which are at best near."""


class Engine(Protocol):
    """Local training of one model in one round."""

    def load(
        self,
        graph: Graph,
        layers: Layers,
        side: Side,
        plan: TrainingPlan,
        draws: Draws,
        shift: Shift | None = None,
    ) -> None:
        """Take a model; momentum starts at zero. The loss of classes adds `shift` to their logits."""

    def train_epoch(self, batches: Iterable[Batch]) -> EpochResult:
        """One pass over the batches, updating codes and side tensors after each."""

    def layers(self) -> Layers:
        """The codes as they are now."""

    def fractions(self) -> Mapping[str, Fractions]:
        """256ths of a code beside the codes of each layer, flat; empty under the paper's rule."""

    def side(self) -> Side:
        """The side tensors as they are now."""

    def rest(self) -> None:
        """Give back the memory that only training needs, until it trains again; the model stays."""


@dataclass(frozen=True)
class _Entry:
    module: str
    attribute: str
    install: str
    options: Mapping[str, bool] = field(default_factory=dict)
    amply: Mapping[str, bool] = field(default_factory=dict)
    """What it is asked for besides where memory is ample."""


_LAB, _EDGE = (f'pip install "fedmpq[{extra}]"' for extra in ("lab", "edge"))
_NATIVE = "fedmpq.training.native_engine"
_ENGINES = {
    "native": _Entry(_NATIVE, "NativeEngine", _EDGE, amply={"ample": True}),
    "native-float-errors": _Entry(_NATIVE, "NativeEngine", _EDGE, {"float_errors": True}),
    "torch": _Entry("fedmpq.training.torch_engine", "TorchEngine", _LAB),
}
DEFAULT_ENGINE = "native"


def engine_names() -> tuple[str, ...]:
    return tuple(_ENGINES)


def make_engine(name: str, threads: int | None = None, ample: bool = False) -> Engine:
    """The engine of that name on so many threads (all cores by default), which may take more memory where it
    is `ample`, if that makes it faster.

    One that cannot be loaded is an error, never another engine instead.
    """
    if name not in _ENGINES:
        raise EngineError(f"there is no engine {name!r}; this version has: {', '.join(_ENGINES)}")
    entry = _ENGINES[name]
    try:
        factory = getattr(import_module(entry.module), entry.attribute)
    except ImportError as error:
        raise EngineError(
            f"engine {name!r} cannot be loaded ({error}); install it: {entry.install}"
        ) from error
    options = {**entry.options, **(entry.amply if ample else {})}
    engine: Engine = factory(threads=threads, **options)
    return engine
