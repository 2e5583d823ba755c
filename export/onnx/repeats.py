"""Repeated pieces of a graph as model-local functions: a file says once what its layers have in common.

A graph is compressed like a text by its most frequent pairs of letters. A pair is a node and the only reader
of its result, or a node and a constant it reads; two pairs are alike if their operators, attributes and ways
of sharing inputs are. The pair whose function saves most bytes becomes one, its nodes are calls then, and
calls pair again, until nothing is saved. Functions used once are melted into their users in the end. ONNX
Runtime inlines them all when it loads the file, before it folds and fuses, so what it runs is the same graph.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

import onnx
from onnx import helper

from fedmpq.export.onnx.opset import OPSET
from fedmpq.export.onnx.short_names import short_names

DOMAIN = "f"
# As long as most names of values are in the end.
_SOME_NAME = "xx"
_TAG_AND_LENGTH = 2


@dataclass(frozen=True)
class Call:
    """A node; `attributes` are serialized, in the order of their names."""

    op: str
    domain: str
    attributes: tuple[bytes, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, node: onnx.NodeProto) -> Call:
        attributes = sorted(node.attribute, key=lambda attribute: attribute.name)
        return cls(
            node.op_type,
            node.domain,
            tuple(attribute.SerializeToString(deterministic=True) for attribute in attributes),
            tuple(node.input),
            tuple(node.output),
        )

    @property
    def kind(self) -> tuple[str, str, tuple[bytes, ...]]:
        return self.op, self.domain, self.attributes

    def renamed(self, names: Mapping[str, str]) -> Call:
        inputs = tuple(names.get(name, name) for name in self.inputs)
        return replace(self, inputs=inputs, outputs=tuple(names.get(name, name) for name in self.outputs))

    def proto(self) -> onnx.NodeProto:
        node = onnx.NodeProto(op_type=self.op, input=self.inputs, output=self.outputs)
        if self.domain:
            node.domain = self.domain
        node.attribute.extend(onnx.AttributeProto.FromString(text) for text in self.attributes)
        return node

    @property
    def size(self) -> int:
        """Bytes in a file where all names have the usual length."""
        same = {name: _SOME_NAME for name in (*self.inputs, *self.outputs) if name}
        named = replace(self.renamed(same), op=DOMAIN) if self.domain == DOMAIN else self.renamed(same)
        return named.proto().ByteSize() + _TAG_AND_LENGTH


@dataclass(frozen=True)
class Function:
    """`calls` compute the only output from the inputs."""

    name: str
    inputs: tuple[str, ...]
    output: str
    calls: tuple[Call, ...]

    def proto(self) -> onnx.FunctionProto:
        """Under names of its own, the shortest there are."""
        uses = Counter(self.inputs)
        for call in self.calls:
            uses.update(name for name in (*call.inputs, *call.outputs) if name)
        short = short_names(uses)
        imports = [helper.make_opsetid("", OPSET)]
        if any(call.domain == DOMAIN for call in self.calls):
            imports.append(helper.make_opsetid(DOMAIN, 1))
        return helper.make_function(
            DOMAIN,
            self.name,
            [short[name] for name in self.inputs],
            [short[self.output]],
            [call.renamed(short).proto() for call in self.calls],
            imports,
        )

    @property
    def size(self) -> int:
        return self.proto().ByteSize() + _TAG_AND_LENGTH


@dataclass(frozen=True)
class _Pair:
    """Where in the list of calls a pair is; without a `first`, its reader reads a constant there."""

    first: int | None
    reader: int
    place: int


@dataclass
class _Graph:
    """Calls in order of execution; None where one has been merged into its reader."""

    calls: list[Call | None]
    constants: Mapping[str, onnx.TensorProto]
    kept: AbstractSet[str]
    functions: dict[str, Function] = field(default_factory=dict)

    def alike(self) -> list[list[_Pair]]:
        """All pairs, those that are alike together."""
        uses, makers = Counter[str](), dict[str, int]()
        for number, call in enumerate(self.calls):
            if call is not None:
                uses.update(call.inputs)
                makers.update((name, number) for name in call.outputs)
        found = defaultdict[object, list[_Pair]](list)
        for number, call in enumerate(self.calls):
            if call is None or len(call.outputs) != 1:
                continue
            for place, name in enumerate(call.inputs):
                maker = makers.get(name)
                if name in self.constants:
                    found[(name, call.kind, place, _sharing(call.inputs))].append(_Pair(None, number, place))
                elif maker is not None and uses[name] == 1 and name not in self.kept:
                    first = self.calls[maker]
                    assert first is not None
                    if len(first.outputs) == 1:
                        key = first.kind, call.kind, place, _sharing(_joined(first, call, place))
                        found[key].append(_Pair(maker, number, place))
        return [_apart(pairs) for pairs in found.values()]

    def body(self, pair: _Pair) -> Function:
        """The function that a pair would be."""
        reader = self.calls[pair.reader]
        assert reader is not None
        name = f"{DOMAIN}{len(self.functions)}"
        if pair.first is None:
            constant = reader.inputs[pair.place]
            node = helper.make_node("Constant", [], [constant], value=_nameless(self.constants[constant]))
            inputs = tuple(dict.fromkeys(each for each in reader.inputs if each and each != constant))
            return Function(name, inputs, reader.outputs[0], (Call.of(node), reader))
        first = self.calls[pair.first]
        assert first is not None
        given = _joined(first, reader, pair.place)
        inputs = tuple(dict.fromkeys(each for each in given if each))
        return Function(name, inputs, reader.outputs[0], (first, reader))

    def call_of(self, function: Function) -> Call:
        return Call(function.name, DOMAIN, (), function.inputs, (function.output,))

    def saved(self, pairs: Sequence[_Pair]) -> int:
        """Bytes that a function for these saves."""
        function = self.body(pairs[0])
        now = function.calls[1].size + (0 if pairs[0].first is None else function.calls[0].size)
        return len(pairs) * (now - self.call_of(function).size) - function.size

    def replace(self, pairs: Sequence[_Pair]) -> None:
        function = self.body(pairs[0])
        for pair in pairs:
            call = replace(self.call_of(self.body(pair)), op=function.name)
            if pair.first is not None:
                self.calls[pair.first] = None
            self.calls[pair.reader] = call
        self.functions[function.name] = function


def share_repeats(
    nodes: Sequence[onnx.NodeProto], small: Mapping[str, onnx.TensorProto], kept: AbstractSet[str]
) -> tuple[list[Call], list[Function]]:
    """The nodes with what repeats in functions, which come after those that they use.

    Constants in `small` may become part of a function. Values in `kept` stay values of the graph.
    """
    graph = _Graph([Call.of(node) for node in nodes], small, kept)
    while True:
        candidates = [(graph.saved(pairs), pairs) for pairs in graph.alike() if len(pairs) > 1]
        saved, pairs = max(candidates, key=lambda candidate: candidate[0], default=(0, []))
        if saved <= 0:
            break
        graph.replace(pairs)
    calls = [call for call in graph.calls if call is not None]
    return calls, _melted(calls, graph.functions)


def _melted(calls: Sequence[Call], functions: Mapping[str, Function]) -> list[Function]:
    """The functions without those used once, which become part of the one that uses them."""
    uses = Counter(call.op for call in calls)
    uses.update(call.op for function in functions.values() for call in function.calls)
    done: dict[str, Function] = {}
    for function in functions.values():
        # Those used by it come first.
        body: list[Call] = []
        for number, call in enumerate(function.calls):
            once = call.domain == DOMAIN and uses[call.op] == 1
            body.extend(_inlined(done.pop(call.op), call, f"{number}.") if once else [call])
        done[function.name] = replace(function, calls=tuple(body))
    return list(done.values())


def _inlined(function: Function, call: Call, prefix: str) -> list[Call]:
    """The function's calls in the place of a call of it; values inside get names that are new there."""
    inner = {name: f"{prefix}{name}" for each in function.calls for name in each.outputs}
    outer = dict(zip(function.inputs, call.inputs, strict=True)) | {function.output: call.outputs[0]}
    return [each.renamed(inner | outer) for each in function.calls]


def _joined(first: Call, reader: Call, place: int) -> tuple[str, ...]:
    return (*first.inputs, *reader.inputs[:place], *reader.inputs[place + 1 :])


def _sharing(inputs: Sequence[str]) -> tuple[int, ...]:
    """Which of these are the same, and which are left out."""
    return tuple(inputs.index(name) if name else -1 for name in inputs)


def _apart(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Those that have no call in common with one before."""
    taken, apart = set[int](), []
    for pair in pairs:
        members = {pair.reader} if pair.first is None else {pair.first, pair.reader}
        if not members & taken:
            taken |= members
            apart.append(pair)
    return apart


def _nameless(tensor: onnx.TensorProto) -> onnx.TensorProto:
    copy = onnx.TensorProto()
    copy.CopyFrom(tensor)
    copy.ClearField("name")
    return copy
