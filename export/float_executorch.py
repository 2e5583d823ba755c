"""The same network in fp32 for XNNPACK: what an exported `.pte.xz` is compared with in its own runtime.

BatchNorm is folded into its layer and activations are not quantized, as in `export.float_onnx`. It takes the
normalised image in float32 (N, C, H, W), of at most 64 images.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedmpq.export.executorch_runtime import quiet
from fedmpq.export.float_onnx import Tensors, folded
from fedmpq.export.format import FORMAT, MAX_BATCH, VERSION_METHOD
from fedmpq.model.graph import (
    INPUT,
    Add,
    AvgPool,
    BatchNorm,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Graph,
    Linear,
    MaxPool,
    Node,
    Quantize,
    Relu,
)


def lower_float_to_executorch(graph: Graph, weights: Tensors, side: Tensors) -> bytes:
    """`weights` by layer and `side` tensors by name, as `graph` says; a `.pte`."""
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        module = _FloatModule(graph, weights, side).eval()
        example = torch.zeros(MAX_BATCH, *graph.input.shape)
        batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
        exported = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
        edge = to_edge_transform_and_lower(
            exported, partitioner=[XnnpackPartitioner()], constant_methods={VERSION_METHOD: FORMAT}
        )
        return bytes(edge.to_executorch().buffer)


class _FloatModule(nn.Module):
    """Runs the graph's nodes in order; parameters bear the number of theirs."""

    def __init__(self, graph: Graph, weights: Tensors, side: Tensors) -> None:
        super().__init__()
        self.graph = graph
        for number, node in enumerate(graph.nodes):
            if isinstance(node.op, Conv2d | Linear):
                for name, array in zip(("weight", "bias"), folded(graph, node, weights, side), strict=True):
                    tensor = torch.from_numpy(np.ascontiguousarray(array))
                    self.register_parameter(f"{name}{number}", nn.Parameter(tensor, requires_grad=False))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        values = {INPUT: image}
        for number, node in enumerate(self.graph.nodes):
            values[node.name] = self._computed(number, node, [values[name] for name in node.inputs])
        return values[self.graph.output]

    def _computed(self, number: int, node: Node, inputs: list[torch.Tensor]) -> torch.Tensor:
        op, source = node.op, inputs[0]
        if isinstance(op, Conv2d | Linear):
            weight, bias = (self.get_parameter(f"{name}{number}") for name in ("weight", "bias"))
            if isinstance(op, Linear):
                return functional.linear(source, weight, bias)
            return functional.conv2d(source, weight, bias, op.stride, op.padding, op.dilation, op.groups)
        if isinstance(op, BatchNorm | Quantize):
            return source
        if isinstance(op, Relu):
            return functional.hardtanh(source, 0.0, op.maximum) if op.maximum else functional.relu(source)
        if isinstance(op, Add):
            return source + inputs[1]
        if isinstance(op, GlobalAvgPool):
            return source.mean((2, 3), keepdim=True)
        if isinstance(op, Flatten):
            return source.flatten(1)
        assert isinstance(op, MaxPool | AvgPool)
        pool = functional.max_pool2d if isinstance(op, MaxPool) else functional.avg_pool2d
        return pool(source, op.kernel, op.stride, op.padding)
