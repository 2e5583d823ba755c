"""BatchNorms of codes in training: the map of an identity layer's accumulators, forward and backward.

The layer (`model.quantized.identity_layer`) has weight 63 for every channel and is never trained, so errors
pass through it as they are, without being rounded to 8 bits for a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.kernels import bound
from fedmpq.kernels.call import Call
from fedmpq.kernels.prototypes import FedmpqExtent
from fedmpq.kernels.tensors import Conv
from fedmpq.model.quantized import identity_layer
from fedmpq.training.binding import Binding, Scratch, StepUnit, Tensor
from fedmpq.training.native_plan import NormUnit
from fedmpq.training.normalization import BoundNormMap, SideGradients


@dataclass(frozen=True)
class NormForward:
    """A BatchNorm whose forward calls are bound."""

    unit: NormUnit
    source: Tensor
    target: Tensor
    conv: Conv
    weights: NDArray[np.int8]
    multiply: Call
    map: BoundNormMap
    compute: Call
    """The map of the step under way."""
    requantize: Call

    @classmethod
    def bind(cls, unit: NormUnit, binding: Binding) -> NormForward:
        source = binding.tensors[unit.source]
        channels = source.shape[0]
        conv = Conv.over(source.images, source.shape, out_channels=channels, groups=channels)
        target = binding.quantized_tensor(source.images, source.shape, unit.quantizer)
        binding.tensors[unit.output] = target
        binding.sparing.add(unit.output)
        layer = identity_layer(channels)
        weights = layer.integer_weights().reshape(-1)
        scale = np.full(channels, layer.integer_scale(), np.float32)
        acc = binding.layout.buffer(conv.images * conv.outputs, np.int32)
        sums, threads = binding.scratch.sums, binding.threads
        multiply = binding.bind(bound.conv_forward(conv, source.codes, weights, threads, acc, sums))
        ones = np.ones(channels, np.float32)
        norm_map = BoundNormMap(conv, scale, None, source, target, binding, unit.norm, ones)
        compute = norm_map.bind(binding, f"{unit.norm.name!r}")
        requantize = binding.bind(
            bound.requantize(acc, _extent(conv), norm_map.rescale, target.pairs, threads, target.buffer)
        )
        return cls(unit, source, target, conv, weights, multiply, norm_map, compute, requantize)

    def bind_backward(self, binding: Binding) -> BoundNorm:
        conv, layout, threads, maps = self.conv, binding.layout, binding.threads, self.map
        error = binding.errors.pop(self.unit.output)
        shared = any(other is error for other in binding.errors.values())
        acc = layout.buffer(conv.images * conv.outputs, np.int32)
        sum_up = binding.bind(
            bound.conv_backward_sums(
                conv,
                self.source.codes,
                self.weights,
                None,
                error,
                maps.rescale,
                maps.normalize,
                threads,
                acc,
                binding.scratch.sums,
            )
        )
        norm = self.unit.norm
        names = (f"{norm.name}.{part}" for part in ("bias", "weight"))
        learnt = tuple(binding.side.gradients[binding.side.places[name]] for name in names)
        side = SideGradients(f"{norm.name!r}", conv, self.unit.quantizer, learnt, norm, binding)
        greatest = layout.buffer(conv.images, np.float32)
        turned = layout.buffer(error.count, np.uint16) if shared else error
        turn = binding.bind(
            bound.backward_error(
                acc,
                error,
                _extent(conv),
                maps.rescale,
                maps.normalize,
                maps.gain,
                *side.means,
                threads,
                turned,
                greatest,
            )
        )
        added = binding.deliver(self.unit.source, turned)
        return BoundNorm(self, NormBackward(sum_up, side, turn, added))

    def forward_only(self) -> BoundNorm:
        return BoundNorm(self, None)


@dataclass(frozen=True)
class NormBackward:
    """The backward calls of a BatchNorm, bound."""

    sum_up: Call
    side: SideGradients
    turn: Call
    """Errors of the codes to errors of what was normalized."""
    add_errors: Call | None


@dataclass(frozen=True)
class BoundNorm:
    """A BatchNorm bound both ways."""

    forward: NormForward
    backward: NormBackward | None

    def settle(self, scratch: Scratch) -> Norm:
        return Norm(self.forward, self.backward)


class Norm(StepUnit):
    """A BatchNorm of codes with its rounding, ready to run."""

    def __init__(self, forward: NormForward, backward: NormBackward | None) -> None:
        self.bound = forward
        self.forward = forward.multiply, forward.compute, forward.requantize
        if backward is not None:
            added = () if backward.add_errors is None else (backward.add_errors,)
            self.backward = backward.sum_up, backward.side.compute, backward.turn, *added


def _extent(conv: Conv) -> FedmpqExtent:
    return FedmpqExtent(conv.images, conv.pixels, conv.out_channels)
