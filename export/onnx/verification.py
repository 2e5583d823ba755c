"""An exported `.onnx` against the integer reference, through ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from fedmpq.export.format import INPUT_NAME, ExportError
from fedmpq.export.onnx.lowering import lower_to_onnx, zero_point
from fedmpq.export.onnx.runtime import OnnxRunner
from fedmpq.export.onnx.shapes import kept_operators
from fedmpq.export.operations import RoundedLayer, operations
from fedmpq.export.pooling import is_even
from fedmpq.export.target import Images
from fedmpq.export.verify import Values, channels_last, require_logits
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import INPUT
from fedmpq.model.shape_steps import PoolAverage

# Whatever of these is left after loading unpacks weights at each run, or computes in another arithmetic.
LEFT_OVERS = {
    "BitShift", "BitwiseAnd", "Conv", "ConvInteger", "CumSum", "Expand", "FusedConv", "Gather",
    "GatherElements", "Gemm", "Less", "MatMul", "MatMulInteger", "Pad", "QLinearMul", "ScatterElements",
    "Sign", "Slice", "Split", "Tile",
}  # fmt: skip


def verify(path: Path, model: DeployedModel, images: Images) -> None:
    """Equal logits to the bit, and an optimized graph of integer convolutions alone."""
    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        runner = OnnxRunner(path, optimized=optimized)
        check_optimized(optimized, model)
    got = runner.logits(images)
    require_logits("ONNX Runtime", model, images, got, values=lambda some: values(path, model, some))


def check_optimized(path: Path, model: DeployedModel) -> None:
    """In the graph as the runtime has optimized it, every layer is integer and nothing is left to unpack."""
    found = Counter(node.op_type for node in onnx.load(path).graph.node)
    steps = tuple(operations(model.program, model.layers))
    if left := sorted((found - kept_operators(steps)).keys() & LEFT_OVERS):
        raise ExportError(
            f"ONNX Runtime leaves {left[0]} in {model.graph.name!r}; this release of it does not fold or"
            " fuse what 1.31 does: install that"
        )
    averages = [step for step in steps if isinstance(step, PoolAverage) and is_even(step)]
    wanted = len(averages) + sum(isinstance(step, RoundedLayer) for step in steps)
    if found["QLinearConv"] != wanted:
        raise ExportError(
            f"ONNX Runtime makes {found['QLinearConv']} integer convolutions of {model.graph.name!r},"
            f" which has {wanted}: install release 1.31"
        )


def values(path: Path, model: DeployedModel, images: Images) -> Values:
    """The codes of every value as ONNX Runtime computes them from this file.

    Those that an addition clamps are clamped here.
    """
    formats = model.program.formats
    names = lower_to_onnx(model.program, model.layers, {}).names
    wanted = [name for name in formats if name != INPUT]
    proto = onnx.load(path)
    proto.graph.output.extend(
        helper.make_tensor_value_info(names[name], TensorProto.UINT8, None) for name in wanted
    )
    runner = OnnxRunner(proto.SerializeToString())
    found = runner.session.run([names[name] for name in wanted], {INPUT_NAME: images})
    codes = {}
    for name, stored in zip(wanted, found, strict=True):
        form = formats[name]
        clamped = np.clip(stored.astype(np.int32) - zero_point(form), form.low, form.high)
        codes[name] = channels_last(clamped)
    return codes
