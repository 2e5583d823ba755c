"""Exported models against the integer reference, through the real runtime."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.export.format import INPUT_NAME, MAX_BATCH, ExportError
from fedmpq.export.operations import RoundedLayer, operations
from fedmpq.model.graph import INPUT
from fedmpq.model.integer_forward import logits, trace_values
from fedmpq.model.integer_program import IntegerProgram, PoolAverage
from fedmpq.model.native_products import native_products
from fedmpq.model.quantized import QuantizedLayer

Images = NDArray[np.uint8]
Values = dict[str, NDArray[Any]]

LOGIT_TOLERANCE = 1e-5
"""Of ExecuTorch, relative to the greatest logit: its last layer adds in float32."""
# Whatever of these is left after loading unpacks weights at each run, or computes in another arithmetic.
LEFT_OVERS = {
    "BitShift", "BitwiseAnd", "CastLike", "Conv", "ConvInteger", "Expand", "FusedConv", "Gather", "Gemm",
    "MatMul", "MatMulInteger", "Pad", "QLinearMul", "ReduceProd", "ScatterElements", "Slice", "Tile",
    "Unsqueeze",
}  # fmt: skip


def random_images(program: IntegerProgram, count: int, seed: int = 0) -> Images:
    """Noise, and at the ends a black and a white image."""
    image = program.graph.input
    shape = (count, image.height, image.width, image.channels)
    images = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    images[0], images[-1] = 0, 255
    return images


def reference(program: IntegerProgram, images: Images) -> NDArray[np.float32]:
    return logits(program, images, products=native_products)


def verify_onnx(
    path: Path, program: IntegerProgram, layers: Mapping[str, QuantizedLayer], images: Images
) -> None:
    """Equal logits to the bit, and an optimized graph of integer convolutions alone."""
    from fedmpq.export.onnx_runtime import OnnxRunner

    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        runner = OnnxRunner(path, optimized=optimized)
        check_optimized(optimized, program, layers)
    got, expected = runner.logits(images), reference(program, images)
    if not np.array_equal(got, expected):
        wrong = np.flatnonzero((got != expected).any(axis=1))[:1]
        _fail("ONNX Runtime", program, images[wrong], lambda some: onnx_values(path, program, layers, some))


def check_optimized(path: Path, program: IntegerProgram, layers: Mapping[str, QuantizedLayer]) -> None:
    """Of the graph as the runtime optimized it: every layer a QLinearConv, nothing left to unpack."""
    import onnx

    found = Counter(node.op_type for node in onnx.load(path).graph.node)
    if left := sorted(found.keys() & LEFT_OVERS):
        raise ExportError(
            f"ONNX Runtime leaves {left[0]} in {program.graph.name!r}; this release of it does not fold or"
            " fuse what 1.31 does: install that"
        )
    wanted = sum(isinstance(step, RoundedLayer | PoolAverage) for step in operations(program, layers))
    if found["QLinearConv"] != wanted:
        raise ExportError(
            f"ONNX Runtime makes {found['QLinearConv']} integer convolutions of {program.graph.name!r},"
            f" which has {wanted}: install release 1.31"
        )


def verify_executorch(
    path: Path, program: IntegerProgram, layers: Mapping[str, QuantizedLayer], images: Images
) -> None:
    """Equal logits but for the last layer's float32 sums."""
    from fedmpq.export.executorch_runtime import ExecuTorchRunner

    got, expected = ExecuTorchRunner(path).logits(images), reference(program, images)
    limit = LOGIT_TOLERANCE * max(1.0, float(np.abs(expected).max(initial=0)))
    wrong = np.flatnonzero(~(np.abs(got - expected) <= limit).all(axis=1))[:1]
    if len(wrong):
        _fail("ExecuTorch", program, images[wrong], lambda some: executorch_values(program, layers, some))


def first_difference(program: IntegerProgram, images: Images, values: Values) -> str | None:
    """The first of the given values, in order of execution, that differs from the reference's."""
    expected = trace_values(program, images, products=native_products)
    for step in program.steps:
        if step.output in values and not np.array_equal(values[step.output], expected[step.output]):
            return step.output
    return None


def onnx_values(
    path: Path, program: IntegerProgram, layers: Mapping[str, QuantizedLayer], images: Images
) -> Values:
    """The codes of every value as ONNX Runtime computes them from this file.

    Those that an addition clamps are clamped here.
    """
    import onnx
    from onnx import TensorProto, helper

    from fedmpq.export.onnx_lowering import lower_to_onnx, zero_point
    from fedmpq.export.onnx_runtime import OnnxRunner

    names = lower_to_onnx(program, layers, {}).names
    wanted = [name for name in program.formats if name != INPUT]
    model = onnx.load(path)
    model.graph.output.extend(
        helper.make_tensor_value_info(names[name], TensorProto.UINT8, None) for name in wanted
    )
    runner = OnnxRunner(model.SerializeToString())
    found = runner.session.run([names[name] for name in wanted], {INPUT_NAME: images})
    values = {}
    for name, stored in zip(wanted, found, strict=True):
        form = program.formats[name]
        codes = stored.astype(np.int32) - zero_point(form)
        values[name] = _channels_last(np.clip(codes, form.low, form.high))
    return values


def executorch_values(
    program: IntegerProgram, layers: Mapping[str, QuantizedLayer], images: Images
) -> Values:
    """The codes of every value as XNNPACK computes them."""
    from fedmpq.export.executorch_lowering import lower_to_executorch, stored_zero
    from fedmpq.export.executorch_runtime import ExecuTorchRunner

    wanted = [name for name in program.formats if name != INPUT]
    runner = ExecuTorchRunner(lower_to_executorch(program, layers, wanted))
    found = runner.outputs(images[:MAX_BATCH])
    return {
        name: _channels_last(codes.astype(np.int32) - stored_zero(program.formats[name]))
        for name, codes in zip(wanted, found, strict=True)
    }


def _channels_last(values: NDArray[Any]) -> NDArray[Any]:
    return values.transpose(0, 2, 3, 1) if values.ndim == 4 else values


def _fail(runtime: str, program: IntegerProgram, images: Images, values: Callable[[Images], Values]) -> None:
    name = first_difference(program, images, values(images)) or program.output
    raise ExportError(
        f"{runtime} computes {name!r} of {program.graph.name!r} otherwise than the integer reference; the"
        " file is deleted. Please report it with the run's checkpoint"
    )
