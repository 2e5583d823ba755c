"""The fp32 twin as an ExecuTorch program for XNNPACK: float32 (N, C, H, W), of at most 64 images."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedmpq.export.executorch.functions import function_of
from fedmpq.export.executorch.runtime import quiet
from fedmpq.export.executorch.shapes import joined
from fedmpq.export.float_network import FloatLayer, FloatNetwork, PlainOp
from fedmpq.export.format import FORMAT, MAX_BATCH, VERSION_METHOD
from fedmpq.model.graph import (
    INPUT,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    ChannelShuffle,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Linear,
    Lookup,
    MaxPool,
    Mul,
    Pad,
    Relu,
    Slice,
    Upsample,
)
from fedmpq.model.never import assert_never
from fedmpq.model.rearrangements import Rearrangement


def lower_float(network: FloatNetwork) -> bytes:
    """The content of a `.pte`."""
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        module = _FloatModule(network).eval()
        example = torch.zeros(MAX_BATCH, *network.image)
        batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
        exported = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
        edge = to_edge_transform_and_lower(
            exported, partitioner=[XnnpackPartitioner()], constant_methods={VERSION_METHOD: FORMAT}
        )
        return bytes(edge.to_executorch().buffer)


class _FloatModule(nn.Module):
    """Runs the steps in order; parameters bear the number of theirs."""

    def __init__(self, network: FloatNetwork) -> None:
        super().__init__()
        self.network = network
        for number, step in enumerate(network.steps):
            if isinstance(step, FloatLayer):
                for name, array in (("weight", step.weight), ("bias", step.bias)):
                    tensor = torch.from_numpy(np.ascontiguousarray(array))
                    self.register_parameter(f"{name}{number}", nn.Parameter(tensor, requires_grad=False))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        values = {INPUT: image}
        for number, step in enumerate(self.network.steps):
            if isinstance(step, FloatLayer):
                values[step.output] = self._layer(number, step.op, values[step.source])
            else:
                values[step.output] = _plain(step.op, [values[name] for name in step.sources])
        return values[self.network.output]

    def _layer(self, number: int, op: Conv2d | Linear, source: torch.Tensor) -> torch.Tensor:
        weight, bias = (self.get_parameter(f"{name}{number}") for name in ("weight", "bias"))
        if not isinstance(op, Conv2d):
            return functional.linear(source, weight, bias)
        return functional.conv2d(source, weight, bias, op.stride, op.padding, op.dilation, op.groups)


def _plain(op: PlainOp, inputs: list[torch.Tensor]) -> torch.Tensor:
    source = inputs[0]
    if isinstance(op, Relu):
        return functional.hardtanh(source, 0.0, op.maximum) if op.maximum else functional.relu(source)
    if isinstance(op, Add | Mul):
        return source + inputs[1] if isinstance(op, Add) else source * inputs[1]
    if isinstance(op, Concat):
        return joined(inputs)
    if isinstance(op, GlobalAvgPool):
        return source.mean((2, 3), keepdim=True)
    if isinstance(op, AdaptiveAvgPool):
        return functional.adaptive_avg_pool2d(source, op.size)
    if isinstance(op, Flatten):
        return source.flatten(1)
    if isinstance(op, MaxPool):
        return functional.max_pool2d(source, op.kernel, op.stride, op.padding, ceil_mode=op.ceil_mode)
    if isinstance(op, AvgPool):
        counted = not op.exclude_padding
        return functional.avg_pool2d(source, op.kernel, op.stride, op.padding, op.ceil_mode, counted)
    if isinstance(op, Lookup):
        return function_of(op, source)
    return _moved(source, op)


def _moved(source: torch.Tensor, op: Rearrangement) -> torch.Tensor:
    if isinstance(op, Slice):
        return source[:, op.start : op.stop]
    if isinstance(op, ChannelShuffle):
        return functional.channel_shuffle(source, op.groups)
    if isinstance(op, Pad):
        (top, left), (bottom, right) = op.before, op.after
        return functional.pad(source, (left, right, top, bottom))
    if isinstance(op, Upsample):
        return functional.interpolate(source, scale_factor=op.factor)
    assert_never(op)
