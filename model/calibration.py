"""BatchNorm statistics measured for the very codes that a device runs.

The average of weights over clients or rounds is another network than any that was trained, and so is every
quantized version of it: the statistics it needs are its own. A board measures them with the integer forward
over some of its images: each BatchNorm is given the mean and variance that its layer's accumulators have over
the batch, and what follows reads codes normalised by them, as in training. Of several batches the means are
averaged, and the variances with the spread of the means (law of total variance); batches count by their
images.

Sums are integers and what follows them single IEEE operations, so every machine measures the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedmpq.model import integer_forward
from fedmpq.model.graph import INPUT, BatchNorm, Conv2d, Graph, Node
from fedmpq.model.integer_program import (
    Accumulate,
    FoldedProduct,
    IntegerProgram,
    Step,
    Vector,
    compile_program,
)
from fedmpq.model.native_products import native_products, summed_products
from fedmpq.model.quantized import Layers, Side
from fedmpq.model.randomness import Draws, Purpose

Images = NDArray[np.uint8]
STATISTICS = ("running_mean", "running_var")
MIN_SAMPLES = 2
"""A client trains and measures on at least so many: BatchNorm needs two values to have a variance."""
CALIBRATION_SAMPLES = 512
"""Statistics are measured on at most so many images of a set."""


def statistics_names(graph: Graph) -> tuple[str, ...]:
    """The side tensors that calibration replaces: mean and variance of every BatchNorm, in order."""
    norms = [node.name for node in graph.nodes if isinstance(node.op, BatchNorm)]
    return tuple(f"{name}.{part}" for name in norms for part in STATISTICS)


def calibration_batches(draws: Draws, batch_size: int, images: Images) -> Iterator[Images]:
    """Images drawn from all there are, which may lie sorted by class; a single last one is left out."""
    order = np.argsort(draws.uniform(len(images), Purpose.CALIBRATE), kind="stable")[:CALIBRATION_SAMPLES]
    for start in range(0, len(order), batch_size):
        chosen = np.sort(order[start : start + batch_size])
        if len(chosen) >= MIN_SAMPLES:
            yield images[chosen]


def measure(graph: Graph, layers: Layers, side: Side, batches: Iterable[Images], threads: int = 1) -> Side:
    """The statistics of the model over these batches, at least one, each of at least two images."""
    merged = MergedStatistics()
    # Which value is read last where is the same whatever the statistics.
    readings = _Readings.of(compile_program(graph, layers, side))
    for images in batches:
        if len(images) < MIN_SAMPLES:
            raise ValueError(f"a batch of {len(images)} images has no variance; give at least {MIN_SAMPLES}")
        forward = _SelfNormalisedForward(graph, images, readings, threads)
        compile_program(graph, layers, side, forward.normalise)
        merged.add(len(images), forward.found)
    return merged.statistics()


@dataclass(frozen=True)
class _Moments:
    mean: NDArray[np.float64]
    square: NDArray[np.float64]


class MergedStatistics:
    """Statistics over several sets of images: with weights `w` that sum to one,

        mean = sum w mean_k,        var = sum w (var_k + mean_k^2) - mean^2

    in float64, in the order in which they are added.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        """The sum of the weights of all that was added."""
        self._sums: dict[str, _Moments] = {}

    def add(self, weight: float, statistics: Mapping[str, NDArray[np.floating]]) -> None:
        """One set of statistics, by the names of side tensors."""
        for name in statistics:
            if not name.endswith(STATISTICS[0]):
                continue
            norm = name.removesuffix(STATISTICS[0])
            mean = statistics[name].astype(np.float64)
            square = statistics[norm + STATISTICS[1]].astype(np.float64) + mean * mean
            held = self._sums.get(norm, _Moments(np.zeros_like(mean), np.zeros_like(mean)))
            self._sums[norm] = _Moments(held.mean + weight * mean, held.square + weight * square)
        self.weight += weight

    def statistics(self) -> Side:
        """The statistics of all that was added, in single precision."""
        if not self.weight > 0:
            raise ValueError("there are no statistics to merge: a calibration needs images")
        found: Side = {}
        for norm, sums in self._sums.items():
            mean = sums.mean / self.weight
            variance = np.maximum(sums.square / self.weight - mean * mean, 0.0)
            found[norm + STATISTICS[0]] = mean.astype(np.float32)
            found[norm + STATISTICS[1]] = variance.astype(np.float32)
        return found


@dataclass(frozen=True)
class _Readings:
    """See the functions of `integer_forward`."""

    last: list[set[str]]
    once: set[str]

    @classmethod
    def of(cls, program: IntegerProgram) -> _Readings:
        return cls(integer_forward.last_readings(program), integer_forward.read_once(program))


class _SelfNormalisedForward:
    """The integer forward of one batch, run while its program is compiled: a BatchNorm is folded with the
    statistics that this batch has there."""

    def __init__(self, graph: Graph, images: Images, readings: _Readings, threads: int) -> None:
        self._threads = threads
        self._readings = readings
        self._values: dict[str, integer_forward.Array] = {
            INPUT: images.astype(np.int32) - graph.input.zero_point
        }
        self._sums: dict[str, integer_forward.Codes] = {}
        self._done = 0
        self.found: dict[str, NDArray[np.float64]] = {}

    def normalise(self, node: Node, product: FoldedProduct, steps: list[Step]) -> tuple[Vector, Vector]:
        """Mean and variance of what `node` reads, once everything before it has run."""
        self._run(steps)
        codes = integer_forward.as_codes(self._values[product.source])
        features = codes.ndim == 2 and isinstance(product.op, Conv2d)
        codes = codes[:, None, None, :] if features else codes
        sums, total, squares = summed_products(codes, product.weight, product.op, self._threads)
        count = sums.size // sums.shape[-1]
        scale = np.float64(product.input.scale) * product.weight_scale
        mean = total / count
        variance = np.maximum(squares / count - mean * mean, 0.0) * scale * scale
        mean = mean * scale + product.offset
        self._sums[node.name] = sums.reshape(len(sums), -1) if features else sums
        self.found[f"{node.name}.{STATISTICS[0]}"] = mean
        self.found[f"{node.name}.{STATISTICS[1]}"] = variance
        return mean.astype(np.float32), variance.astype(np.float32)

    def _run(self, steps: list[Step]) -> None:
        for step, read in zip(steps[self._done :], self._readings.last[self._done :], strict=False):
            if isinstance(step, Accumulate) and step.output in self._sums:
                sums = self._sums.pop(step.output)
                sums += step.bias
                self._values[step.output] = sums
            else:
                products = partial(native_products, threads=self._threads)
                self._values[step.output] = integer_forward.apply(
                    step, self._values, products, self._readings.once
                )
            for name in read:
                del self._values[name]
        self._done = len(steps)
