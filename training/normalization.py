"""BatchNorm and the rounding behind it as one affine map of a layer's accumulators, a number per channel.

With `s` the scale of an accumulator, `mean` and `var` the accumulators' over the batch, `b` the layer's bias
and `target` the scale of the codes behind it:

    r = 1/sqrt(s^2 var + eps),  norm = s r,  bias = -mean s r,  normalized value = acc norm + bias
    t = (gamma * normalized + beta) / target,  code = rint(t)

and without BatchNorm `t = (acc s + b) / target`. Statistics are tracked of `acc s + b`, the variance
unbiased, as torch does it. Back, the error of an accumulator in units of the integer weights (scale `w`) is
`gain` times that of BatchNorm's output less its means, `gain = gamma r w`, and `w` without BatchNorm.

Everything here happens once per layer and step on a few dozen numbers, so the time goes into calls of NumPy:
they write into memory that is already there, and what has the same factor is multiplied in one call.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels.tensors import Conv, Memory, Rescale
from fedmpq.model.graph import BatchNorm
from fedmpq.training.arena import Layout, StepBuffer
from fedmpq.training.native_layer import TrainedLayer
from fedmpq.training.native_plan import ProductUnit
from fedmpq.training.side_tensors import SideTensors

Doubles = NDArray[np.float64]
Vector = NDArray[np.float32]

_SUM_ROWS, _WORK_ROWS = 4, 5


class Scratch:
    """Doubles that the layers of a step use in turn, rows of one number per channel."""

    def __init__(self, layout: Layout, channels: int) -> None:
        self.sums = layout.buffer(_SUM_ROWS * channels, np.float64)
        """What kernels add up."""
        self.work = layout.buffer(_WORK_ROWS * channels, np.float64)

    def sum_rows(self, channels: int) -> Doubles:
        found: Doubles = self.sums.array[: _SUM_ROWS * channels].reshape(_SUM_ROWS, channels)
        return found

    def work_rows(self, channels: int) -> Doubles:
        found: Doubles = self.work.array[: _WORK_ROWS * channels].reshape(_WORK_ROWS, channels)
        return found


class ChannelMap:
    """The map of a layer without BatchNorm."""

    def __init__(self, unit: ProductUnit, conv: Conv, layer: TrainedLayer, side: SideTensors) -> None:
        self._channels = int(conv.out_channels)
        self._scale = layer.scale
        self._offset = side.values[side.places[f"{unit.node.name}.bias"]] if unit.op.bias else None
        self.norm: Memory = np.zeros(self._channels, np.float32)
        self.bias: Memory = self.norm
        self.gain: Memory = layer.scale

    def bind(self, layout: Layout, scratch: Scratch, statistics: StepBuffer) -> None:
        """The moment at which it is computed."""
        self._t_buffer = layout.buffer(2 * self._channels, np.float32)
        layout.use(self._t_buffer, scratch.work)

    def rescale(self, low: int, high: int) -> Rescale:
        scale, shift = self._t_buffer.split(2)
        return Rescale(scale, shift, low, high)

    def settle(self, scratch: Scratch) -> None:
        """Take hold of the buffers' arrays, once they have places."""
        self.t: Vector = self._t_buffer.array
        self._t_rows = self.t.reshape(2, self._channels)
        self._pair = scratch.work_rows(self._channels)[:2]
        self._s, self._shift = self._pair

    def compute(self, source: float, target: float) -> None:
        """The map from codes of scale `source` to codes of scale `target`: scale and shift of `t`."""
        self._s[...] = self._scale
        np.multiply(self._s, source, self._s)
        self._shift[...] = 0.0 if self._offset is None else self._offset
        np.divide(self._pair, target, self._pair)
        self._t_rows[...] = self._pair


class NormMap(ChannelMap):
    """With BatchNorm, by the sums and sums of squares of the accumulators that the scratch holds."""

    def __init__(self, unit: ProductUnit, conv: Conv, layer: TrainedLayer, side: SideTensors) -> None:
        super().__init__(unit, conv, layer, side)
        assert unit.norm is not None
        assert isinstance(unit.norm.op, BatchNorm)
        name, self._eps = unit.norm.name, unit.norm.op.eps
        self._count = int(conv.images * conv.pixels)
        self._unbiased = self._count / max(1, self._count - 1)
        self._gamma, self._beta = (side.values[side.places[f"{name}.{part}"]] for part in ("weight", "bias"))
        self._running = [side.running_places[f"{name}.{part}"] for part in ("running_mean", "running_var")]

    def bind(self, layout: Layout, scratch: Scratch, statistics: StepBuffer) -> None:
        super().bind(layout, scratch, statistics)
        self._norm_buffer = layout.buffer(3 * self._channels, np.float32)
        self.norm, self.bias, self.gain = self._norm_buffer.split(3)
        self._statistics = statistics
        layout.use(self._norm_buffer, scratch.sums, statistics)

    def settle(self, scratch: Scratch) -> None:
        super().settle(scratch)
        self._sums = scratch.sum_rows(self._channels)[:2]
        self._centre: Doubles = self._sums[0]
        self._deviation: Doubles = self._sums[1]
        self._wide_scale, self._wide_gamma, self._wide_beta = scratch.work_rows(self._channels)[2:]
        normed = self._norm_buffer.array.reshape(3, self._channels)
        self._normed, self._gains = normed[:2], normed[2]
        self._mean, self._variance = (self._statistics.array[place] for place in self._running)

    def compute(self, source: float, target: float) -> None:
        pair, shift, scale, gamma = self._pair, self._shift, self._wide_scale, self._wide_gamma
        scale[...], gamma[...], self._wide_beta[...] = self._scale, self._gamma, self._beta
        np.multiply(scale, source, self._s)
        inverse = self._inverse_deviation()
        np.multiply(pair, inverse, pair)
        np.negative(shift, shift)
        self._normed[...] = pair
        np.multiply(pair, gamma, pair)
        np.add(shift, self._wide_beta, shift)
        np.divide(pair, target, pair)
        self._t_rows[...] = pair
        np.multiply(gamma, inverse, gamma)
        np.multiply(gamma, scale, gamma)
        self._gains[...] = gamma

    def _inverse_deviation(self) -> Doubles:
        """`r`; on the way the mean of `acc s` goes where the shift will be, and statistics are kept."""
        scale, mean, centre, variance = self._s, self._shift, self._centre, self._deviation
        np.divide(self._sums, self._count, self._sums)
        np.multiply(centre, scale, mean)
        np.multiply(centre, centre, centre)
        np.subtract(variance, centre, variance)
        np.maximum(variance, 0.0, out=variance)
        np.multiply(variance, scale, variance)
        np.multiply(variance, scale, variance)
        self._mean[...] = mean if self._offset is None else mean + self._offset
        np.multiply(variance, self._unbiased, self._variance)
        np.add(variance, self._eps, variance)
        np.sqrt(variance, variance)
        np.divide(1.0, variance, variance)
        return variance
