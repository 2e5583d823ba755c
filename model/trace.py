"""From a `torch.nn.Module` to a `Graph`.

`torch.export` records the forward pass in evaluation mode as a list of ATen calls; each is translated by the
method that `_SUPPORTED` names for it. What is not in that table is an error that names call and module.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmpq.model.aten_lookups import LOOKUPS, lookup_of
from fedmpq.model.aten_shapes import SHAPE_CALLS, VIEWS, Grouped, ShapeCalls, as_image, pair
from fedmpq.model.dropout import Dropout
from fedmpq.model.graph import (
    INPUT,
    Add,
    BatchNorm,
    Conv2d,
    Graph,
    Input,
    Linear,
    Mul,
    Node,
    Op,
    Relu,
    Shape,
    Size,
)
from fedmpq.model.quantizers import place_quantizers
from fedmpq.model.recorded_calls import call_of, names_by_tensor

if TYPE_CHECKING:
    import torch


class TraceError(ValueError):
    """A module that cannot become a graph; the message names the operation and the path of the module."""


def trace(
    module: torch.nn.Module,
    example: torch.Tensor,
    *,
    name: str,
    activation_bits: int | None = 4,
    input_scale: float,
    input_zero_point: int,
) -> Graph:
    """The graph of `module` for images like `example` (N, C, H, W), with its quantizers placed.

    An example (N, C, L) is that of a one-dimensional network, whose graph has images of height 1.

    Layers and BatchNorms are named by the path of their module, other nodes by what they compute.
    `activation_bits` None leaves the quantizers out. The module itself is left as it was.
    """
    if example.ndim not in (3, 4):
        raise TraceError(
            f"the example has shape {tuple(example.shape)}, needs (N, channels, height, width) or, for a"
            " one-dimensional network, (N, channels, length)"
        )
    channels, height, width = as_image(tuple(example.shape[1:]))
    image = Input(channels, height, width, float(np.float32(input_scale)), input_zero_point)
    tracer = _Tracer(module, _export(module, example, name), name)
    graph = _frozen(tracer.graph(image), module)
    return graph if activation_bits is None else place_quantizers(graph, activation_bits)


@contextmanager
def _evaluation_mode(module: torch.nn.Module) -> Iterator[None]:
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def _frozen(graph: Graph, module: torch.nn.Module) -> Graph:
    """The graph with those nodes frozen whose weight needs no gradient."""
    learnt = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
    nodes = (replace(node, frozen=not learnt.get(f"{node.name}.weight", True)) for node in graph.nodes)
    return replace(graph, nodes=tuple(nodes))


def _export(module: torch.nn.Module, example: torch.Tensor, name: str) -> torch.export.ExportedProgram:
    import torch

    # Two samples: a model that mixes up the batch with another axis would go unnoticed with one.
    batch = example[:1].detach().repeat(2, *(1 for _ in example.shape[1:]))
    with _evaluation_mode(module), torch.no_grad():
        try:
            return torch.export.export(module, (batch,))
        # Its refusals have a dozen types, and what the forward pass itself raises comes through as well.
        except Exception as error:
            lines = str(error).strip().splitlines() or ["no message"]
            raise TraceError(
                f"torch.export cannot record {name!r} with samples of shape {tuple(batch.shape[1:])}"
                f" (channels first): {type(error).__name__}: {lines[0]}"
                " (forward must take one image tensor and not branch on its values)"
            ) from error


class _Tracer(ShapeCalls):
    """Translates the calls of one exported program, in order."""

    def __init__(self, module: torch.nn.Module, program: torch.export.ExportedProgram, name: str) -> None:
        self.module = module
        self.program = program
        self.name = name
        self.nodes: list[Node] = []
        # What a recorded value is called in the graph; a call that changes nothing shares its input's name.
        self.names: dict[torch.fx.Node, str] = {}
        # The shape that a value of the graph had when it was made; reshaped it may go by the same name.
        self.held: dict[str, Shape] = {}
        self.grouped: dict[torch.fx.Node, Grouped] = {}
        # Values that share memory have the same owner: writing to one in place changes all.
        self.owner: dict[torch.fx.Node, torch.fx.Node] = {}
        self.overwritten: dict[torch.fx.Node, str] = {}
        signature = program.graph_signature
        self.dropped: dict[torch.fx.Node, Dropout] = {}
        """What training drops of a recorded value."""
        self.drops: dict[str, Dropout] = {}
        """What a layer drops of what it reads."""
        self.tensors = {"parameter": signature.inputs_to_parameters, "buffer": signature.inputs_to_buffers}
        self.tensor_names = names_by_tensor(module)
        self.taken = {INPUT, *(tensor.rpartition(".")[0] for tensor in self.tensor_names)}

    def graph(self, image: Input) -> Graph:
        inputs = set(self.program.graph_signature.user_inputs)
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node.name in inputs:
                self.names[node], self.owner[node] = INPUT, node
                self.held[INPUT] = self._shape(node)[1:]
            elif node.op == "call_function":
                self._translate(node)
            elif node.op not in ("placeholder", "output"):
                raise TraceError(f"torch.export recorded a {node.op} ({node.target}): no graph can hold it")
        output = self._output()
        return Graph(self.name, image, tuple(self._needed_by(output)), output)

    def _output(self) -> str:
        outputs = self.program.graph_signature.user_outputs
        results = [node for node in self.names if node.name in outputs]
        if len(results) != 1 or not self.program.call_spec.out_spec.is_leaf():
            raise TraceError(
                f"{self.name!r} must return one tensor computed from the image, not {len(outputs)} values"
            )
        return self._read(results[0], results[0])

    def _needed_by(self, output: str) -> list[Node]:
        """Without the calls whose result nobody uses."""
        needed = {output}
        for node in reversed(self.nodes):
            if node.name in needed:
                needed.update(node.inputs)
        kept = (node for node in self.nodes if node.name in needed)
        return [replace(node, dropout=self.drops.get(node.name)) for node in kept]

    def _translate(self, node: torch.fx.Node) -> None:
        recorded = str(node.target).replace("<built-in function getitem>", "getitem")
        call = call_of(node)
        method = _SUPPORTED.get(call)
        if method is None:
            raise self._error(node, f"is not supported; supported are {', '.join(_SUPPORTED)}")
        self.names[node] = name = method(self, node, self._arguments(node))
        self.held.setdefault(name, self._shape(node)[1:])
        self._note_memory(node, in_place=call != recorded, may_share=call in _VIEWS)
        self._note_dropout(node, call)

    def _note_dropout(self, node: torch.fx.Node, call: str) -> None:
        """Views of a dropped value are dropped, and layers drop it when they read it."""
        read = [self.dropped[each] for each in node.all_input_nodes if each in self.dropped]
        if not read:
            return
        dropped = read[0]
        if call in _DROPOUTS:
            own = self.dropped.setdefault(node, dropped)
            if own.whole_channels != dropped.whole_channels:
                raise self._error(node, "drops again, another kind of thing; use one dropout of the two")
            if own is not dropped:
                self.dropped[node] = own.behind(dropped)
        elif call in _LAYERS and not (dropped.whole_channels and isinstance(self.nodes[-1].op, Linear)):
            self.drops[self.names[node]] = dropped
        elif call in _VIEWS and not dropped.whole_channels:
            self.dropped[node] = dropped
        else:
            warnings.warn(
                f"{node.target} in {self._path(node)} reads what a dropout gives: training will drop nothing"
                " there, which it only does right before a convolution or a linear layer",
                stacklevel=2,
            )

    def _note_memory(self, node: torch.fx.Node, *, in_place: bool, may_share: bool) -> None:
        owner = self.owner[node.all_input_nodes[0]]
        if in_place:
            # torch.export lets later calls read the new value, except through a view taken before.
            self.overwritten.update({other: node.name for other in self.owner if self.owner[other] is owner})
        self.owner[node] = owner if in_place or may_share else node

    def _arguments(self, node: torch.fx.Node) -> dict[str, Any]:
        """The call's arguments by name, defaults filled in; those of Python's own functions by number."""
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            return {str(number): argument for number, argument in enumerate(node.args)}
        values = {argument.name: argument.default_value for argument in schema.arguments}
        names = [argument.name for argument in schema.arguments]
        return {**values, **dict(zip(names, node.args, strict=False)), **node.kwargs}

    def _path(self, node: torch.fx.Node) -> str:
        stack = list(node.meta.get("nn_module_stack", {}).values())
        # The second call of a module is recorded as "path@1".
        path = stack[-1][0].partition("@")[0] if stack else ""
        return f"module {path!r}" if path else f"the forward of {type(self.module).__name__}"

    def _error(self, node: torch.fx.Node, problem: str) -> TraceError:
        return TraceError(f"{node.target} in {self._path(node)} {problem}")

    def _read(self, value: Any, reader: torch.fx.Node) -> str:
        """Name in the graph of a value computed from the image."""
        if value not in self.names:
            raise self._error(reader, f"reads {value}, which is not computed from the image; leave it out")
        if value in self.overwritten:
            raise self._error(
                reader, f"reads a value that {self.overwritten[value]} changed in place; do that out of place"
            )
        if value in self.grouped:
            raise self._error(reader, "reads channels in groups; only a channel shuffle may have them so")
        return self.names[value]

    def _parameter(self, node: torch.fx.Node, value: Any, kind: str, part: str) -> str:
        """Path of the module whose parameter or buffer `part` is `value`; it becomes the node's name."""
        name: str | None = self.tensors[kind].get(getattr(value, "name", ""))
        if name is None:
            raise self._error(node, f"has a {part} that is no {kind} of a module; use the layers of torch.nn")
        path, _, last = name.rpartition(".")
        if last != part or not path:
            raise self._error(node, f"has a {part} called {name!r}; use torch.nn's layers in a module")
        if len(self.tensor_names[name]) > 1:
            raise self._error(
                node, f"has a shared {part}: {', '.join(self.tensor_names[name])}; give each its own"
            )
        return path

    def _owned(self, node: torch.fx.Node, arguments: dict[str, Any], parts: dict[str, str]) -> str:
        """The one module that owns all `parts` (kind by name) of the call; None is no part."""
        paths = {
            self._parameter(node, arguments[part], kind, part)
            for part, kind in parts.items()
            if arguments[part] is not None
        }
        if len(paths) != 1:
            raise self._error(node, f"takes its parameters from several modules: {', '.join(sorted(paths))}")
        path = paths.pop()
        if any(other.name == path for other in self.nodes):
            raise self._error(node, f"uses the weight of {path!r} a second time; every layer needs its own")
        if path == INPUT:
            raise self._error(node, f"has the reserved name {INPUT!r}; rename the module")
        return path

    def _emit(self, name: str, op: Op, *inputs: str) -> str:
        self.nodes.append(Node(name, op, inputs))
        return name

    def _fresh(self, node: torch.fx.Node) -> str:
        """The recorded name of a node without parameters, unless a module path is spelt like it."""
        # In place, "relu" and "relu_1" are recorded as "relu_" and "relu__1".
        return self._untaken(node.name.rstrip("_").replace("__", "_"))

    def _untaken(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def _shape(self, value: Any) -> Shape:
        """Of a recorded value; of the first if it is several."""
        found = value.meta["val"]
        return tuple((found[0] if isinstance(found, list | tuple) else found).shape)

    def _conv(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        path = self._owned(node, arguments, {"weight": "parameter", "bias": "parameter"})
        out_channels, _, *sides = self._shape(arguments["weight"])
        flat = len(sides) == 1
        kernel, dilation = pair(sides, flat, 1), pair(arguments["dilation"], flat, 1)
        op = Conv2d(
            in_channels=self._shape(arguments["input"])[1],
            out_channels=out_channels,
            kernel=kernel,
            stride=pair(arguments["stride"], flat, 1),
            padding=self._padding(node, arguments["padding"], kernel, dilation, flat),
            dilation=dilation,
            groups=arguments["groups"],
            bias=arguments["bias"] is not None,
        )
        return self._emit(path, op, self._read(arguments["input"], node))

    def _padding(self, node: torch.fx.Node, padding: Any, kernel: Size, dilation: Size, flat: bool) -> Size:
        if padding == "valid":
            return (0, 0)
        if padding != "same":
            return pair(padding, flat, 0)
        total = (dilation[0] * (kernel[0] - 1), dilation[1] * (kernel[1] - 1))
        if total[0] % 2 or total[1] % 2:
            raise self._error(node, f"with padding 'same' pads kernel {kernel} unevenly; use an odd kernel")
        return (total[0] // 2, total[1] // 2)

    def _linear(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        path = self._owned(node, arguments, {"weight": "parameter", "bias": "parameter"})
        if len(self._shape(arguments["input"])) != 2:
            raise self._error(
                node, f"reads shape {self._shape(arguments['input'])}; flatten to (N, features) first"
            )
        out_features, in_features = self._shape(arguments["weight"])
        op = Linear(in_features, out_features, bias=arguments["bias"] is not None)
        return self._emit(path, op, self._read(arguments["input"], node))

    def _batch_norm(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        buffers = {"running_mean": "buffer", "running_var": "buffer"}
        parts = {"weight": "parameter", "bias": "parameter", **buffers}
        if missing := [part for part in parts if arguments[part] is None]:
            raise self._error(
                node, f"has no {' and '.join(missing)}; use affine=True and track_running_stats=True"
            )
        if arguments["training"]:
            raise self._error(
                node, "takes the statistics of the batch in evaluation mode; use the running ones"
            )
        path = self._owned(node, arguments, parts)
        if getattr(self.module.get_submodule(path), "momentum", 0.0) is None:
            raise self._error(node, "has momentum=None (cumulative average); give it a number, such as 0.1")
        source = self._read(arguments["input"], node)
        channels = self._shape(arguments["input"])[1]
        return self._emit(path, BatchNorm(channels, arguments["eps"], arguments["momentum"]), source)

    def _relu(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        return self._emit(self._fresh(node), Relu(0.0), self._read(arguments["self"], node))

    def _relu6(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        return self._emit(self._fresh(node), Relu(6.0), self._read(arguments["self"], node))

    def _hardtanh(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        low, high = arguments["min_val"], float(np.float32(arguments["max_val"]))
        if low != 0 or high <= 0:
            raise self._error(node, f"cuts at {low} and {high}; the first must be 0, the second above it")
        return self._emit(self._fresh(node), Relu(high), self._read(arguments["self"], node))

    def _lookup(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        try:
            op = lookup_of(call_of(node), arguments)
        except ValueError as error:
            raise self._error(node, str(error)) from None
        return self._emit(self._fresh(node), op, self._read(arguments["self"], node))

    def _add(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        if arguments["alpha"] != 1:
            raise self._error(node, f"has alpha={arguments['alpha']}; only plain sums are supported")
        left, right = (self._read(arguments[side], node) for side in ("self", "other"))
        shapes = self._shape(arguments["self"]), self._shape(arguments["other"])
        if shapes[0] != shapes[1]:
            raise self._error(node, f"adds shapes {shapes[0]} and {shapes[1]}, which must be equal")
        return self._emit(self._fresh(node), Add(), left, right)

    def _mul(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        if not hasattr(arguments["other"], "meta"):
            raise self._error(node, f"multiplies by the number {arguments['other']}; only values can be")
        # The one that is spread over the other's pixels comes second.
        sides = sorted(("self", "other"), key=lambda side: -math.prod(self._shape(arguments[side])))
        shapes = [self._shape(arguments[side]) for side in sides]
        if shapes[1] not in (shapes[0], (*shapes[0][:2], 1, 1)):
            raise self._error(
                node, f"multiplies shapes {shapes[0]} and {shapes[1]}; use equal ones or (N, C, 1, 1)"
            )
        return self._emit(self._fresh(node), Mul(), *(self._read(arguments[side], node) for side in sides))

    def _dropout(self, node: torch.fx.Node, arguments: dict[str, Any]) -> str:
        if arguments["train"]:
            raise self._error(
                node, "drops values in evaluation too; use nn.Dropout or training=self.training"
            )
        if arguments["p"] > 0:
            rate = float(np.float32(arguments["p"]))
            if not rate < 1:
                raise self._error(node, f"has p={arguments['p']}; use a rate below 1")
            self.dropped[node] = Dropout(rate, call_of(node) == "aten.feature_dropout.default")
        # In place its argument has another name.
        return self._read(arguments.get("input", arguments.get("self")), node)


_Method = Callable[[_Tracer, "torch.fx.Node", dict[str, Any]], str]

_SUPPORTED: dict[str, _Method] = {
    "aten.conv2d.default": _Tracer._conv,
    "aten.conv2d.padding": _Tracer._conv,
    "aten.conv1d.default": _Tracer._conv,
    "aten.conv1d.padding": _Tracer._conv,
    "aten.linear.default": _Tracer._linear,
    "aten.batch_norm.default": _Tracer._batch_norm,
    "aten.relu.default": _Tracer._relu,
    "aten.relu6.default": _Tracer._relu6,
    "aten.hardtanh.default": _Tracer._hardtanh,
    **dict.fromkeys(LOOKUPS, _Tracer._lookup),
    "aten.add.Tensor": _Tracer._add,
    "aten.mul.Tensor": _Tracer._mul,
    "aten.dropout.default": _Tracer._dropout,
    "aten.feature_dropout.default": _Tracer._dropout,
    **dict(SHAPE_CALLS),
}

# All that may hand on the memory of their input.
_LAYERS = {call for call, method in _SUPPORTED.items() if method in (_Tracer._conv, _Tracer._linear)}
_DROPOUTS = {"aten.dropout.default", "aten.feature_dropout.default"}
_VIEWS = {*VIEWS, *_DROPOUTS}
