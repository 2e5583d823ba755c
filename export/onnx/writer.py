"""Nodes and constants of an ONNX graph under the shortest names: a small model is names for a good part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from fedmpq.export.onnx.functions import DOMAIN, FUNCTIONS


class OnnxWriter:
    """Collects nodes; equal constants are stored once."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._by_content: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._values = 0

    def constant(self, array: NDArray[np.generic] | np.generic) -> str:
        """The name of the constant with this content."""
        array = np.asarray(array)
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._by_content:
            self._by_content[key] = f"c{len(self.constants)}"
            self.constants.append(numpy_helper.from_array(array, self._by_content[key]))
        return self._by_content[key]

    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        *,
        name: str | None = None,
        output: str | None = None,
        **attributes: Any,
    ) -> str:
        """Add a node, of ours where the operator's name is one of our functions'; the name of its output."""
        if output is None:
            output, self._values = f"v{self._values}", self._values + 1
        domain = DOMAIN if op_type in FUNCTIONS else None
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=name, domain=domain, **attributes))
        return output

    @property
    def functions_used(self) -> set[str]:
        return {node.op_type for node in self.nodes if node.domain == DOMAIN}
