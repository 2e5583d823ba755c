"""A training step of the native engine, bound to a batch size."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.tensors import Buffer
from fedmpq.model.graph import INPUT, Flatten, Graph
from fedmpq.model.randomness import Draws
from fedmpq.training.arena import Layout
from fedmpq.training.binding import Binding, BoundUnit, Tensor
from fedmpq.training.move_units import Flattening, Pool, Sum
from fedmpq.training.native_layer import TrainedLayer
from fedmpq.training.native_plan import ProductUnit, SumUnit, Unit
from fedmpq.training.normalization import Scratch
from fedmpq.training.product_units import Logits, Product
from fedmpq.training.side_tensors import SideTensors


class NativeStep:
    """One step on so many images; `layout` is to be put into memory before it runs."""

    def __init__(
        self,
        graph: Graph,
        units: Sequence[Unit],
        images: int,
        layers: dict[str, TrainedLayer],
        side: SideTensors,
        draws: Draws,
        threads: int,
        float_errors: bool,
    ) -> None:
        self.layout = layout = Layout()
        self._side = side
        self._step = c_uint32()
        self._image = _image(graph, images)
        self._labels = Buffer(images, np.int64)
        self._scratch = Scratch(layout, max(len(layer.scale) for layer in layers.values()))
        self._statistics = layout.buffer(side.statistics, np.float64)
        binding = Binding(
            layers=layers,
            side=side,
            draws=draws,
            threads=threads,
            float_errors=float_errors,
            step=self._step,
            labels=self._labels,
            layout=layout,
            scratch=self._scratch,
            statistics=self._statistics,
            tensors={INPUT: self._image},
        )
        self._units = [_bound(unit, binding) for unit in units]
        layout.use(self._statistics)
        for unit in reversed(self._units):
            unit.bind_backward(binding)
        self._quantized = [binding.tensors[quantizer.name] for quantizer in side.quantizers]
        self._logits = next(unit for unit in self._units if isinstance(unit, Logits))

    def put_into(self, block: NDArray[np.uint8]) -> None:
        self.layout.put_into(block)
        for unit in self._units:
            unit.settle(self._scratch)

    def run(self, number: int, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> tuple[float, int]:
        """Train on a batch; its mean loss, and how many answers were right."""
        self._step.value = number
        self._image.buffer.put(np.ascontiguousarray(images).reshape(-1))
        self._labels.put(np.ascontiguousarray(labels))
        try:
            for tensor, scale in zip(self._quantized, self._side.scales(), strict=True):
                tensor.scale = scale
            for unit in self._units:
                unit.forward()
            self._side.track(self._statistics.array)
            for unit in reversed(self._units):
                unit.backward()
            self._side.update()
        finally:
            self._image.buffer.drop()
            self._labels.drop()
        return self._logits.loss, self._logits.right


def _image(graph: Graph, images: int) -> Tensor:
    """The input: pixels are codes."""
    image = graph.input
    channels, height, width = image.shape
    pixels = Buffer(images * channels * height * width, np.uint8)
    low, high = -image.zero_point, 255 - image.zero_point
    scale = float(np.float32(image.scale))
    return Tensor(pixels, low, high, images, (channels, height, width), scale)


def _bound(unit: Unit, binding: Binding) -> BoundUnit:
    if isinstance(unit, ProductUnit):
        if unit.quantizer is None:
            return Logits(unit, binding)
        return Product(unit, unit.quantizer, binding)
    if isinstance(unit, SumUnit):
        return Sum(unit, binding)
    return Flattening(unit, binding) if isinstance(unit.op, Flatten) else Pool(unit, binding)
