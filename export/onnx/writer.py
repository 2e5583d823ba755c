"""Nodes and constants of an ONNX graph, and the small file they make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from fedmpq.export.onnx.opset import IR_VERSION, OPSET
from fedmpq.export.onnx.repeats import DOMAIN, Call, Function, share_repeats
from fedmpq.export.onnx.short_names import short_names

# Larger ones are no part of what repeats.
_MOST_SHARED_BYTES = 64


class OnnxWriter:
    """Collects nodes; equal constants are stored once."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._by_content: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._values = 0

    def constant(self, array: NDArray[np.generic] | np.generic) -> str:
        """The name of the constant with this content."""
        array = np.asarray(array)
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._by_content:
            name = self._by_content[key] = f"c{len(self.constants)}"
            self.constants[name] = _tensor(array, name)
        return self._by_content[key]

    def nibbles(self, array: NDArray[np.uint8]) -> str:
        """The name of a constant of 4 bits each."""
        even = np.pad(array.ravel(), (0, array.size % 2))
        name = f"c{len(self.constants)}"
        self.constants[name] = onnx.TensorProto(
            name=name,
            data_type=onnx.TensorProto.UINT4,
            dims=array.shape,
            raw_data=(even[0::2] | even[1::2] << 4).tobytes(),
        )
        return name

    def node(
        self, op_type: str, inputs: Sequence[str], *, output: str | None = None, **attributes: Any
    ) -> str:
        """Add a node; the name of its output. Inputs named "" are left out."""
        output = self._value() if output is None else output
        self._add(op_type, inputs, [output], attributes)
        return output

    def parts(self, source: str, sizes: Sequence[int], **attributes: Any) -> list[str]:
        """Add a Split; the names of the parts."""
        outputs = [self._value() for _ in sizes]
        self._add("Split", [source, self.constant(np.array(sizes, np.int64))], outputs, attributes)
        return outputs

    def _value(self) -> str:
        self._values += 1
        return f"v{self._values}"

    def _add(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, Any]
    ) -> None:
        given = list(inputs)
        while given and not given[-1]:
            given.pop()
        self.nodes.append(helper.make_node(op_type, given, outputs, **attributes))

    def model(
        self,
        name: str,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
        names: Mapping[str, str],
    ) -> tuple[onnx.ModelProto, dict[str, str]]:
        """The model, and the values' names in it for those in `names`, which stay values of its graph."""
        own = {info.name for info in (*inputs, *outputs)}
        small = {key: tensor for key, tensor in self.constants.items() if _is_small(tensor)}
        calls, functions = share_repeats(self.nodes, small, own | set(names.values()))
        short = short_names(_uses(calls, own), own) | {each: each for each in own}
        short_functions = short_names(_function_uses(calls, functions))
        graph = helper.make_graph(
            [_called(call, short_functions).renamed(short).proto() for call in calls],
            name,
            inputs,
            outputs,
            [_named(tensor, short[key]) for key, tensor in self.constants.items() if key in short],
        )
        imports = [helper.make_opsetid("", OPSET)] + [helper.make_opsetid(DOMAIN, 1)] * bool(functions)
        model = helper.make_model(
            graph,
            functions=[_renamed_function(function, short_functions) for function in functions],
            opset_imports=imports,
            ir_version=IR_VERSION,
            producer_name="fedmpq",
        )
        return model, {key: short[value] for key, value in names.items()}


def _tensor(array: NDArray[np.generic], name: str) -> onnx.TensorProto:
    """Whole numbers of a length of their own where that is shorter than so many bytes each."""
    raw = numpy_helper.from_array(array, name)
    if array.dtype not in (np.int32, np.int64):
        return raw
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    varied = helper.make_tensor(name, kind, array.shape, array.ravel().tolist())
    return min(raw, varied, key=lambda tensor: tensor.ByteSize())


def _is_small(tensor: onnx.TensorProto) -> bool:
    return tensor.ByteSize() <= _MOST_SHARED_BYTES


def _named(tensor: onnx.TensorProto, name: str) -> onnx.TensorProto:
    tensor.name = name
    return tensor


def _uses(calls: Sequence[Call], own: set[str]) -> Counter[str]:
    """How often each value is named; a constant is once more where it is stored, as a result is."""
    uses = Counter[str]()
    for call in calls:
        uses.update(name for name in (*call.inputs, *call.outputs) if name and name not in own)
    return uses


def _function_uses(calls: Sequence[Call], functions: Sequence[Function]) -> Counter[str]:
    every = [*calls, *(call for function in functions for call in function.calls)]
    return Counter(call.op for call in every if call.domain == DOMAIN)


def _called(call: Call, names: Mapping[str, str]) -> Call:
    return replace(call, op=names[call.op]) if call.domain == DOMAIN else call


def _renamed_function(function: Function, names: Mapping[str, str]) -> onnx.FunctionProto:
    calls = tuple(_called(call, names) for call in function.calls)
    return replace(function, name=names[function.name], calls=calls).proto()
