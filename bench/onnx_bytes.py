"""Where the bytes of an exported `.onnx` are, part by part; they sum to the file.

Of two models: one as `bench.inference` makes it, whose codes lie about the middle of their range as those of
fresh weights do, and one of the same layers with every code as likely as any other, of which no code of
single weights takes fewer bits than its planes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx

from bench.inference import make_model
from fedmpq.export.card import bare_bytes
from fedmpq.export.onnx.lowering import lower_to_onnx
from fedmpq.model import zoo
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.grid import MAX_BITS

PLANE_AXES = 3
"""Bit-planes are the constants of so many axes that are bytes: planes, bytes, 1."""


def with_flat_codes(model: DeployedModel) -> DeployedModel:
    random = np.random.default_rng(0)
    layers = {}
    for name, layer in model.layers.items():
        least = 1 if layer.bits == MAX_BITS else 0
        codes = random.integers(least, 2**layer.bits, layer.codes.shape, dtype=np.uint8)
        layers[name] = replace(layer, codes=codes)
    return replace(model, layers=layers)


def parts(content: bytes) -> dict[str, int]:
    """Bytes of each part of the file; a field's tag and length are counted as the last part's."""
    proto = onnx.load_from_string(content)
    found = Counter[str]()
    for tensor in proto.graph.initializer:
        found[_kind(tensor)] += len(tensor.raw_data)
        found["other constants, names and shapes"] += tensor.ByteSize() - len(tensor.raw_data)
    found["nodes"] = sum(node.ByteSize() for node in proto.graph.node)
    found["functions"] = sum(function.ByteSize() for function in proto.functions)
    found["description"] = sum(entry.ByteSize() for entry in proto.metadata_props)
    found["interface, lengths of parts"] = len(content) - sum(found.values())
    return dict(found)


def _kind(tensor: onnx.TensorProto) -> str:
    if tensor.data_type == onnx.TensorProto.UINT8 and len(tensor.dims) == PLANE_AXES:
        return "bit-planes"
    gaps = onnx.TensorProto.UINT4, onnx.TensorProto.UINT8
    if tensor.data_type in gaps and len(tensor.dims) == 2 and tensor.dims[1] > MAX_BITS:
        return "outliers"
    if tensor.data_type == onnx.TensorProto.INT16:
        return "biases"
    if tensor.data_type == onnx.TensorProto.FLOAT and tensor.dims:
        return "multipliers"
    return "other constants, names and shapes"


def facts_of(name: str, bits: float) -> dict[str, dict[str, float]]:
    model = make_model(name, bits)
    facts = {}
    for kind, each in {"as initialised": model, "flat codes": with_flat_codes(model)}.items():
        content = lower_to_onnx(each.program, each.layers, {"classes": each.class_names}).to_bytes()
        bare = bare_bytes(each)
        sizes = {"bits of the weights": bare, "file": len(content), "ratio": round(len(content) / bare, 4)}
        facts[kind] = sizes | parts(content)
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.onnx_bytes", description=__doc__)
    parser.add_argument("--model", choices=zoo.names(), default="resnet20")
    parser.add_argument("--bits", type=float, default=4.0, help="bits per weight (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    facts = facts_of(arguments.model, arguments.bits)
    if arguments.json:
        print(json.dumps(facts))
        return
    kinds = list(facts)
    rows = dict.fromkeys(row for kind in kinds for row in facts[kind])
    print(f"{'':<36}" + "".join(f"{kind:>16}" for kind in kinds))
    for row in rows:
        print(f"{row:<36}" + "".join(f"{facts[kind].get(row, 0):>16,}" for kind in kinds))


if __name__ == "__main__":
    main()
