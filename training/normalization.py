"""BatchNorm and the rounding behind it as one affine map of a layer's accumulators, a number per channel.

With `s` the scale of an accumulator, `mean` and `var` the accumulators' over the batch, `b` the layer's bias
and `target` the scale of the codes behind it:

    r = 1/sqrt(s^2 var + eps),  norm = s r,  bias = -mean s r,  normalized value = acc norm + bias
    t = (gamma * normalized + beta) / target,  code = rint(t)

and without BatchNorm `t = (acc s + b) / target`. Statistics are tracked of `acc s + b`, the variance
unbiased, as torch does it. Back, the error of an accumulator in units of the integer weights (scale `w`) is
`gain` times that of BatchNorm's output less its means, `gain = gamma r w`, and `w` without BatchNorm.

Everything here happens once per layer and step on a few dozen numbers, in C++: as many calls of NumPy would
take longer than the layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound_maps
from fedmpq.kernels.call import Call
from fedmpq.kernels.memory import Memory
from fedmpq.kernels.prototypes import FedmpqChannelMap
from fedmpq.kernels.tensors import Conv, Normalize, Rescale
from fedmpq.model.graph import BatchNorm, Node
from fedmpq.training.arena import StepBuffer
from fedmpq.training.binding import Binding, Tensor
from fedmpq.training.native_plan import Quantizer

Vector = NDArray[np.float32]


class BoundMap:
    """The map of a layer without BatchNorm, bound."""

    def __init__(
        self,
        conv: Conv,
        scale: Vector,
        offset: Vector | None,
        source: Tensor,
        target: Tensor,
        binding: Binding,
    ) -> None:
        """`scale` is that of the integer weights, `offset` the layer's bias."""
        channels = int(conv.out_channels)
        t_scale, t_shift = binding.layout.buffer(2 * channels, np.float32).split(2)
        self.rescale = Rescale(t_scale, t_shift, target.low, target.high)
        zeros = np.zeros(channels, np.float32)
        self.normalize = Normalize(zeros, zeros)
        self.gain: Memory = scale
        self._channels, self._between = channels, (source.number, target.number)
        self._struct = FedmpqChannelMap(channels=channels)
        self._point(scale=scale, offset=offset, t_scale=t_scale, t_shift=t_shift)

    def bind(self, binding: Binding, layer: str) -> Call:
        """The call that computes the map of the step under way; `layer` is what an error is told of."""
        call = bound_maps.map_channels(self._struct, *self._between)
        return binding.bind(call, f"the scale of {layer}")

    def _point(self, **vectors: Memory | None) -> None:
        for field, vector in vectors.items():
            if vector is not None:
                self._struct.point(field, vector, self._channels)


class BoundNormMap(BoundMap):
    """The map of a layer with BatchNorm, bound."""

    def __init__(
        self,
        conv: Conv,
        scale: Vector,
        offset: Vector | None,
        source: Tensor,
        target: Tensor,
        binding: Binding,
        norm: Node,
        unit: Vector,
    ) -> None:
        """`unit` is what `gain` counts errors in: the scale of the weights that pass them on."""
        super().__init__(conv, scale, offset, source, target, binding)
        assert isinstance(norm.op, BatchNorm)
        side, name, struct, channels = binding.side, norm.name, self._struct, self._channels
        gamma, beta = (side.values[side.places[f"{name}.{part}"]] for part in ("weight", "bias"))
        normed, bias, self.gain = binding.layout.buffer(3 * channels, np.float32).split(3)
        self.normalize = Normalize(normed, bias)
        struct.count, struct.eps = conv.images * conv.pixels, norm.op.eps
        struct.mean_at, struct.variance_at = (
            side.running_places[f"{name}.{part}"].start for part in ("running_mean", "running_var")
        )
        struct.point("sums", binding.scratch.sums, 2 * channels)
        struct.point("statistics", binding.statistics, side.statistics)
        self._point(gamma=gamma, beta=beta, unit=unit, norm=normed, bias=bias, gain=self.gain)


class SideGradients:
    """The gradients of side tensors from the sums over each channel, and BatchNorm's means, bound."""

    def __init__(
        self,
        layer: str,
        conv: Conv,
        quantizer: Quantizer,
        learnt: tuple[Vector, ...],
        norm: Node | None,
        binding: Binding,
    ) -> None:
        """`layer` is what an error is told of; `learnt` has the gradients of beta and gamma, or of the
        layer's bias, if there is one."""
        channels = int(conv.out_channels)
        means = binding.layout.buffer(2 * channels, np.float32)
        first, second = means.split(2)
        self.means: tuple[StepBuffer, StepBuffer] = (first, second)
        """Of the errors and of the errors times the normalized values, by channel; 0 without BatchNorm."""
        shift, scale = (*learnt, None, None)[:2]
        self.compute = binding.bind(
            bound_maps.side_gradients(
                binding.scratch.sums,
                channels,
                0 if norm is None else conv.images * conv.pixels,
                quantizer.op.signed,
                binding.side.clip_gradient(quantizer),
                shift,
                scale,
                self.means,
            ),
            f"the error of {layer}",
        )
