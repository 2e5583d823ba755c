"""Whether layers and side tensors are those of a graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.graph import Graph, Shape
from fedmpq.model.grid import MAX_BITS, code_range
from fedmpq.model.quantized import QuantizedLayer


class ProgramError(ValueError):
    """A graph, codes or side tensors that do not make a program."""


def check_state(
    graph: Graph, layers: Mapping[str, QuantizedLayer], side: Mapping[str, NDArray[np.float32]]
) -> None:
    """Refuse layers or side tensors that are missing, unknown, misshapen or out of range."""
    shapes = {node.name: graph.weight_shape(node.name) for node in graph.layers}
    _check_names("layer", shapes, layers)
    for name, shape in shapes.items():
        _check_layer(name, layers[name], shape)
    side_shapes = graph.side_shapes()
    _check_names("side tensor", side_shapes, side)
    for name, shape in side_shapes.items():
        _check_array(f"side tensor {name!r}", side[name], (shape,), np.float32)
        if not np.isfinite(side[name]).all():
            raise ProgramError(f"side tensor {name!r} has NaN or infinity in it")


def _check_names(what: str, expected: Mapping[str, object], got: Mapping[str, object]) -> None:
    if missing := sorted(expected.keys() - got.keys()):
        raise ProgramError(f"{what} {missing[0]!r} is missing ({len(missing)} of {len(expected)} are)")
    if unknown := sorted(got.keys() - expected.keys()):
        raise ProgramError(f"{what} {unknown[0]!r} is not in the graph ({len(unknown)} such)")


def _check_layer(name: str, layer: QuantizedLayer, shape: Shape) -> None:
    _check_array(f"layer {name!r}: codes", layer.codes, (shape,), np.uint8)
    _check_array(f"layer {name!r}: step", layer.step, ((), shape[:1]), np.float32)
    if not (np.isfinite(layer.step).all() and (layer.step > 0).all()):
        raise ProgramError(f"layer {name!r}: step must be positive and finite")
    if not 1 <= layer.bits <= MAX_BITS:
        raise ProgramError(f"layer {name!r} has {layer.bits} bits, must have 1..{MAX_BITS}")
    low, high = code_range(layer.bits)
    least, greatest = int(layer.codes.min()), int(layer.codes.max())
    if least < low or greatest > high:
        raise ProgramError(
            f"layer {name!r} has codes {least}..{greatest}, at {layer.bits} bits they lie in {low}..{high}"
        )


def _check_array(
    what: str, array: NDArray[np.generic], shapes: tuple[Shape, ...], dtype: type[np.generic]
) -> None:
    if array.shape not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ProgramError(f"{what} of shape {array.shape}, the graph says {expected}")
    if array.dtype != dtype:
        raise ProgramError(f"{what} of {array.dtype}, needs {np.dtype(dtype)}")
