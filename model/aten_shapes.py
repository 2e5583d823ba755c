"""How ATen's calls that pool, join and reshape become operations of a graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fedmpq.model.graph import Node
from fedmpq.model.ops import (
    AdaptiveAvgPool,
    AvgPool,
    ChannelShuffle,
    Concat,
    Flatten,
    GlobalAvgPool,
    MaxPool,
    Op,
    Pad,
    Shape,
    Size,
    Slice,
    Upsample,
)

if TYPE_CHECKING:
    import torch


def pair(value: Any, flat: bool = False, first: int = 0) -> Size:
    """ATen's lists have one element for both axes, or one for each; if `flat`, the one behind `first`."""
    values = [value] if isinstance(value, int) else list(value)
    return (first if flat else values[0], values[-1])


def as_image(shape: Shape) -> Shape:
    """Channels, height and width of a sample (C, L) or (C, H, W); a sequence is an image of height 1."""
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


@dataclass(frozen=True)
class Grouped:
    """Channels as `groups` runs, on their way to a channel shuffle; `turned` if the axes are exchanged."""

    groups: int
    turned: bool


class ShapeCalls(Protocol):
    """The translations themselves; whoever has them says how nodes are read, named and refused."""

    nodes: list[Node]
    names: dict[torch.fx.Node, str]
    held: dict[str, Shape]
    grouped: dict[torch.fx.Node, Grouped]

    def _error(self, node: torch.fx.Node, problem: str) -> ValueError: ...

    def _read(self, value: Any, reader: torch.fx.Node) -> str: ...

    def _emit(self, name: str, op: Op, *inputs: str) -> str: ...

    def _fresh(self, node: torch.fx.Node) -> str: ...

    def _untaken(self, name: str) -> str: ...

    def _shape(self, value: Any) -> Shape: ...

    def _cat(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        inputs = [self._read(value, node) for value in arguments["tensors"]]
        rank = len(self._shape(node))
        if rank not in (3, 4) or arguments["dim"] % rank != 1:
            raise self._error(
                node,
                f"joins along dimension {arguments['dim']} of {rank}; only channels of images, 1, can be",
            )
        return self._emit(self._fresh(node), Concat(), *inputs) if len(inputs) > 1 else inputs[0]

    def _window(self, node: torch.fx.Node, arguments: dict[str, Any]) -> tuple[Size, Size, Size, bool]:
        flat = len(self._shape(node)) == 3
        kernel = pair(arguments["kernel_size"], flat, 1)
        # ATen leaves the stride empty where it is the kernel.
        stride = pair(arguments["stride"], flat, 1) if arguments["stride"] else kernel
        return kernel, stride, pair(arguments["padding"], flat, 0), arguments["ceil_mode"]

    def _max_pool(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        if pair(arguments["dilation"]) != (1, 1):
            raise self._error(node, f"has dilation {arguments['dilation']}; use dilation=1")
        op = MaxPool(*self._window(node, arguments))
        return self._emit(self._fresh(node), op, self._read(arguments["self"], node))

    def _avg_pool(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        if arguments.get("divisor_override") is not None:
            raise self._error(node, "has a divisor_override; leave it out")
        kernel, stride, padding, ceil_mode = self._window(node, arguments)
        # Without padding both ways of counting are the same.
        excluded = not arguments["count_include_pad"] and padding != (0, 0)
        op = AvgPool(kernel, stride, padding, ceil_mode, excluded)
        return self._emit(self._fresh(node), op, self._read(arguments["self"], node))

    def _adaptive_avg_pool(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        source = self._read(arguments["self"], node)
        before, after = (as_image(self._shape(each)[1:])[1:] for each in (arguments["self"], node))
        if after == before:
            return source
        op: Op = AdaptiveAvgPool((after[0], after[1]))
        if after == (1, 1):
            op = GlobalAvgPool()
        elif kernel := _whole_windows(before, after):
            op = AvgPool(kernel, kernel, (0, 0))
        return self._emit(self._fresh(node), op, source)

    def _adaptive_max_pool(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        source = self._read(arguments["self"], node)
        before, after = (as_image(self._shape(each)[1:])[1:] for each in (arguments["self"], node))
        kernel = _whole_windows(before, after)
        if kernel is None:
            raise self._error(
                node, f"takes the greatest of {before} pixels at {after} places, which must divide them"
            )
        return self._emit(self._fresh(node), MaxPool(kernel, kernel, (0, 0)), source)

    def _mean(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        rank = len(self._shape(arguments["self"]))
        axes = sorted(axis % rank for axis in arguments["dim"] or ())
        if rank not in (3, 4) or axes != list(range(2, rank)) or arguments["dtype"] is not None:
            raise self._error(
                node, f"averages dimensions {arguments['dim']}; only rows and columns, (2, 3), can be"
            )
        name = self._emit(self._fresh(node), GlobalAvgPool(), self._read(arguments["self"], node))
        if arguments["keepdim"]:
            return name
        return self._emit(self._untaken(f"{name}.flat"), Flatten(), name)

    def _reshape(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        """Flatten, a step of a channel shuffle, or axes of one element that come or go."""
        value = arguments["self"]
        before, after = self._shape(value), self._shape(node)
        source = self.names[value] if value in self.grouped else self._read(value, node)
        held = self.held[source]
        if before[0] == after[0]:
            after = after[1:]
            if value in self.grouped and after == held:
                turned = self.grouped[value].turned
                shuffle = ChannelShuffle(self.grouped[value].groups)
                return self._emit(self._fresh(node), shuffle, source) if turned else source
            if value not in self.grouped:
                if len(after) == 1:
                    return source if len(held) == 1 else self._emit(self._fresh(node), Flatten(), source)
                if len(held) == 1 and after[0] == math.prod(after):
                    return self._before_flattening(node, source)
                if as_image(after) == as_image(held) or after[0] == held[0] == math.prod(held):
                    return source
                if after[2:] == held[1:] and after[0] * after[1] == held[0]:
                    self.grouped[node] = Grouped(after[0], turned=False)
                    return source
        raise self._error(
            node, f"turns shape {before} into {self._shape(node)}; only (N, everything else) is supported"
        )

    def _before_flattening(self, node: torch.fx.Node, source: str) -> str:
        """The image of one pixel of which `source` is the row of features."""
        maker = next((each for each in self.nodes if each.name == source), None)
        if maker is None or not isinstance(maker.op, Flatten):
            raise self._error(
                node, "makes an image of features; only what was flattened can become one again"
            )
        return maker.inputs[0]

    def _transpose(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        value, rank = arguments["self"], len(self._shape(node))
        order = list(range(rank))
        if "dims" in arguments:
            order = [axis % rank for axis in arguments["dims"]]
        else:
            first, second = arguments["dim0"] % rank, arguments["dim1"] % rank
            order[first], order[second] = second, first
        if value not in self.grouped or order != [0, 2, 1, *range(3, rank)]:
            raise self._error(node, "exchanges axes; only the two of a channel shuffle's groups may be")
        self.grouped[node] = Grouped(self.grouped[value].groups, not self.grouped[value].turned)
        return self.names[value]

    def _same(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        value = arguments["self"]
        if value not in self.grouped:
            return self._read(value, node)
        self.grouped[node] = self.grouped[value]
        return self.names[value]

    def _channel_shuffle(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        op = ChannelShuffle(arguments["groups"])
        return self._emit(self._fresh(node), op, self._read(arguments["self"], node))

    def _split(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        if arguments["dim"] % len(self._shape(node)) != 1:
            raise self._error(node, f"cuts dimension {arguments['dim']}; only channels, 1, can be cut")
        return self._read(arguments["self"], node)

    def _getitem(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        """One of the values that a call gave: a part of the channels, or a pool's first, its greatest."""
        value, number = arguments["0"], arguments["1"]
        source = self._read(value, node)
        if "pool" in str(value.target):
            if number and node.users:
                raise self._error(
                    node, "takes the places of the greatest values; only they themselves can be"
                )
            return source
        sizes = [part.shape[1] for part in value.meta["val"]]
        start = sum(sizes[:number])
        return self._emit(self._fresh(node), Slice(start, start + sizes[number]), source)

    def _slice(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        before, after = self._shape(arguments["self"]), self._shape(node)
        source = self._read(arguments["self"], node)
        if after == before:
            return source
        if arguments["dim"] % len(before) != 1 or arguments["step"] != 1:
            raise self._error(
                node, f"cuts dimension {arguments['dim']}; only channels, 1, can be, in one part"
            )
        start = (arguments["start"] or 0) % before[1]
        return self._emit(self._fresh(node), Slice(start, start + after[1]), source)

    def _pad(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        sides, axes = list(arguments["pad"]), len(self._shape(node)) - 2
        zeros = arguments.get("mode", "constant") == "constant" and not arguments["value"]
        if not zeros or min(sides) < 0 or len(sides) > 2 * axes:
            raise self._error(node, f"pads by {sides}; only zeros around rows and columns can be added")
        left, right, top, bottom = (*sides, 0, 0)[:4]
        op = Pad((top, left), (bottom, right))
        return self._emit(self._fresh(node), op, self._read(arguments["self"], node))

    def _upsample(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        value = arguments["input"] if "input" in arguments else arguments["self"]
        before, after = (as_image(self._shape(each)[1:])[1:] for each in (value, node))
        if any(new % old for new, old in zip(after, before, strict=True)):
            raise self._error(node, f"turns {before} pixels into {after}; only whole factors are supported")
        op = Upsample((after[0] // before[0], after[1] // before[1]))
        return self._emit(self._fresh(node), op, self._read(value, node))


def _whole_windows(before: Shape, after: Shape) -> Size | None:
    """The kernel, and stride, of as many windows as `after` says, if they are all alike."""
    if any(size % count for size, count in zip(before, after, strict=True)):
        return None
    return before[0] // after[0], before[1] // after[1]


_CALLS: dict[Callable[[Any, torch.fx.Node, dict[str, Any]], str], str] = {
    ShapeCalls._cat: "cat.default concat.default",
    ShapeCalls._max_pool: "max_pool2d.default max_pool1d.default",
    ShapeCalls._avg_pool: "avg_pool2d.default avg_pool1d.default",
    ShapeCalls._adaptive_avg_pool: "adaptive_avg_pool2d.default adaptive_avg_pool1d.default",
    ShapeCalls._adaptive_max_pool: "adaptive_max_pool2d.default adaptive_max_pool1d.default",
    ShapeCalls._mean: "mean.dim",
    ShapeCalls._reshape: "flatten.using_ints view.default reshape.default squeeze.default squeeze.dim"
    " squeeze.dims unsqueeze.default",
    ShapeCalls._transpose: "transpose.int permute.default",
    ShapeCalls._same: "contiguous.default clone.default detach.default alias.default",
    ShapeCalls._channel_shuffle: "channel_shuffle.default",
    ShapeCalls._split: "chunk.default split.Tensor split_with_sizes.default",
    ShapeCalls._slice: "slice.Tensor",
    ShapeCalls._pad: "pad.default constant_pad_nd.default",
    ShapeCalls._upsample: "upsample_nearest2d.vec upsample_nearest1d.vec",
}
SHAPE_CALLS = {f"aten.{call}": method for method, calls in _CALLS.items() for call in calls.split()}
SHAPE_CALLS["getitem"] = ShapeCalls._getitem

# All that may hand on the memory of their input; clone never does.
_MAY_SHARE = (ShapeCalls._reshape, ShapeCalls._transpose, ShapeCalls._same, ShapeCalls._split)
VIEWS = {
    call for call, method in SHAPE_CALLS.items() if method in _MAY_SHARE and call != "aten.clone.default"
} | {"getitem", "aten.slice.Tensor"}
