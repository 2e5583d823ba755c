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

from fedmpq.kernels.memory import Memory
from fedmpq.kernels.tensors import Conv, Normalize, Rescale
from fedmpq.model.graph import BatchNorm, Node
from fedmpq.training.binding import Binding, Scratch, Tensor

Doubles = NDArray[np.float64]
Vector = NDArray[np.float32]


class BoundMap:
    """The map of a layer without BatchNorm, bound: its buffers have no places yet."""

    def __init__(
        self, conv: Conv, scale: Vector, offset: Vector | None, target: Tensor, binding: Binding
    ) -> None:
        """`scale` is that of the integer weights, `offset` the layer's bias."""
        self.channels = int(conv.out_channels)
        self.scale, self.offset = scale, offset
        self.t = binding.layout.buffer(2 * self.channels, np.float32)
        binding.layout.use(self.t, binding.scratch.work)
        t_scale, t_shift = self.t.split(2)
        self.rescale = Rescale(t_scale, t_shift, target.low, target.high)
        zeros = np.zeros(self.channels, np.float32)
        self.normalize = Normalize(zeros, zeros)
        self.gain: Memory = scale

    def settle(self, scratch: Scratch) -> ChannelMap:
        """The map on its buffers' arrays, once they have places."""
        return ChannelMap(self, scratch)


class BoundNormMap(BoundMap):
    """The map of a layer with BatchNorm, bound."""

    def __init__(
        self,
        conv: Conv,
        scale: Vector,
        offset: Vector | None,
        target: Tensor,
        binding: Binding,
        norm: Node,
        unit: Vector,
    ) -> None:
        """`unit` is what `gain` counts errors in: the scale of the weights that pass them on."""
        super().__init__(conv, scale, offset, target, binding)
        assert isinstance(norm.op, BatchNorm)
        side, name, self.eps, self.unit = binding.side, norm.name, norm.op.eps, unit
        self.count = int(conv.images * conv.pixels)
        self.gamma, self.beta = (side.values[side.places[f"{name}.{part}"]] for part in ("weight", "bias"))
        self.running = [side.running_places[f"{name}.{part}"] for part in ("running_mean", "running_var")]
        self.statistics = binding.statistics
        self.normed = binding.layout.buffer(3 * self.channels, np.float32)
        normed, bias, self.gain = self.normed.split(3)
        self.normalize = Normalize(normed, bias)
        scratch = binding.scratch
        binding.layout.use(self.t, self.normed, scratch.sums, scratch.work, self.statistics)

    def settle(self, scratch: Scratch) -> NormMap:
        return NormMap(self, scratch)


class ChannelMap:
    """The map of a layer without BatchNorm."""

    def __init__(self, bound: BoundMap, scratch: Scratch) -> None:
        channels = bound.channels
        self._scale, self._offset = bound.scale, bound.offset
        self.t: Vector = bound.t.array
        """Scale and shift of `t`, one after the other."""
        self._t_rows = self.t.reshape(2, channels)
        self._pair = scratch.work_rows(channels)[:2]
        self._s, self._shift = self._pair

    def compute(self, source: float, target: float) -> None:
        """The map from codes of scale `source` to codes of scale `target`: scale and shift of `t`."""
        self._s[...] = self._scale
        np.multiply(self._s, source, self._s)
        self._shift[...] = 0.0 if self._offset is None else self._offset
        np.divide(self._pair, target, self._pair)
        self._t_rows[...] = self._pair


class NormMap(ChannelMap):
    """The map of a layer with BatchNorm, from the accumulators' sums and sums of squares in the scratch."""

    def __init__(self, bound: BoundNormMap, scratch: Scratch) -> None:
        super().__init__(bound, scratch)
        channels = bound.channels
        self._eps, self._gamma, self._beta, self._unit = bound.eps, bound.gamma, bound.beta, bound.unit
        self._count, self._unbiased = bound.count, bound.count / max(1, bound.count - 1)
        self._sums = scratch.sum_rows(channels)[:2]
        self._centre: Doubles = self._sums[0]
        self._deviation: Doubles = self._sums[1]
        self._wide_scale, self._wide_gamma, self._wide_beta = scratch.work_rows(channels)[2:]
        normed = bound.normed.array.reshape(3, channels)
        self._normed, self._gains = normed[:2], normed[2]
        self._mean, self._variance = (bound.statistics.array[place] for place in bound.running)

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
        np.multiply(gamma, self._unit, gamma)
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
