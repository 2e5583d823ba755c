"""The weights and side tensors of a traced `torch.nn.Module`, out of it and back into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.graph import Add, Graph, GraphError, Node, Quantize, Relu, Shape
from fedmpq.model.quantizers import bound_before

if TYPE_CHECKING:
    import torch

    from fedmpq.model.quantized import Side, Weights

RELU_CLIP = 3.0
SUM_CLIP = 4.0
SIGNED_CLIP = 6.0


def initial_state(module: torch.nn.Module, graph: Graph, first_clips: float = 1.0) -> tuple[Weights, Side]:
    """Float32 copies of the module's weights by layer, and of its side tensors by name.

    Clips, which a float module does not have, begin at `first_clips` times 3 behind a ReLU, times 4 behind a
    ReLU of a sum (sums are wider), and at 6 where there is a sign (BatchNorm outputs have deviation about 1),
    but never above what the value can be: the maximum of its ReLU, or 1 behind a sigmoid or tanh.
    """
    tensors = module.state_dict()
    weights = {
        name: _copied(tensors, f"{name}.weight", graph.weight_shape(name))
        for name in (node.name for node in graph.layers)
    }
    clips = {f"{node.name}.clip": _first_clip(graph, node, first_clips) for node in _quantizers(graph)}
    side = {
        name: clips[name] if name in clips else _copied(tensors, name, shape)
        for name, shape in graph.side_shapes().items()
    }
    return weights, side


def load_state(module: torch.nn.Module, graph: Graph, weights: Weights, side: Side) -> None:
    """Writes `weights` and `side` into the module; clips have no place there and are left out."""
    import torch

    tensors = module.state_dict()
    values = {f"{node.name}.weight": weights.get(node.name) for node in graph.layers}
    clips = {f"{node.name}.clip" for node in _quantizers(graph)}
    values.update({name: side.get(name) for name in graph.side_shapes() if name not in clips})
    checked: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, value in values.items():
        target = _tensor(tensors, name)
        if value is None or value.shape not in (tuple(target.shape), _in_two_dimensions(tuple(target.shape))):
            given = "nothing" if value is None else f"shape {value.shape}"
            raise GraphError(f"the state has {given} for {name!r}, the module has {tuple(target.shape)}")
        checked.append((target, torch.from_numpy(np.array(value, dtype=np.float32)).reshape(target.shape)))
    # Only once all fit, so that a failure leaves the module whole.
    with torch.no_grad():
        for target, source in checked:
            target.copy_(source)


def _quantizers(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if isinstance(node.op, Quantize)]


def _first_clip(graph: Graph, node: Node, first_clips: float) -> NDArray[np.float32]:
    assert isinstance(node.op, Quantize)
    source = graph.by_name[node.inputs[0]]
    clip = SIGNED_CLIP if node.op.signed else first_clips * RELU_CLIP
    if not node.op.signed and isinstance(source.op, Relu):
        before = graph.by_name.get(source.inputs[0])
        if before is not None and isinstance(before.op, Add):
            clip = first_clips * SUM_CLIP
    if bound := bound_before(graph, node):
        clip = min(clip, bound)
    return np.array(clip, dtype=np.float32)


def _tensor(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise GraphError(f"the module has no {name!r}: the graph was traced from another one")
    return tensors[name]


def _copied(tensors: dict[str, torch.Tensor], name: str, shape: Shape) -> NDArray[np.float32]:
    tensor = _tensor(tensors, name)
    if _in_two_dimensions(tuple(tensor.shape)) != shape and tuple(tensor.shape) != shape:
        raise GraphError(f"{name!r} has shape {tuple(tensor.shape)} in the module, {shape} in the graph")
    return np.array(tensor.detach().float().cpu().numpy(), dtype=np.float32).reshape(shape)


def _in_two_dimensions(shape: Shape) -> Shape:
    """The shape of a weight; a kernel of one dimension has height 1 in a graph."""
    return (*shape[:2], 1, shape[2]) if len(shape) == 3 else shape
