"""Functions of codes in the runtimes: whatever their float32 errs by, the table comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from fedmpq.export.executorch.functions import function_of as torch_function
from fedmpq.export.executorch.runtime import quiet
from fedmpq.export.exporting import export_model
from fedmpq.export.format import ExportError
from fedmpq.export.onnx.float_functions import function_of as onnx_function
from fedmpq.export.onnx.opset import IR_VERSION, OPSET
from fedmpq.export.onnx.verification import values
from fedmpq.export.onnx.writer import OnnxWriter
from fedmpq.export.real_functions import ERROR_OF_BOUNDED, ERROR_PER_MAGNITUDE, exact_rounding
from fedmpq.model.activations import CodeFormat
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import INPUT, Flatten, Graph, Input, Linear, Lookup, Node
from fedmpq.model.integer_forward import trace_values
from fedmpq.model.lookup_tables import FunctionOfCodes
from fedmpq.model.pointwise import FUNCTIONS, evaluated
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.quantizers import place_quantizers
from tests.functions import PARAMETERS

SPANS = st.sampled_from([(0, 15), (0, 255), (-127, 127), (-120, 135)])
SCALES = st.floats(2**-8, 2**-3, width=32)


@pytest.mark.parametrize("function", FUNCTIONS)
@given(SCALES, SPANS, SCALES, st.sampled_from([(0, 255), (-127, 127), (0, 15)]), st.integers(0, 2**32 - 1))
def test_a_function_that_errs_within_bounds_gives_the_table(
    function: str, scale: float, span: tuple[int, int], out_scale: float, out: tuple[int, int], seed: int
) -> None:
    source, target = CodeFormat(np.float32(scale), *span), CodeFormat(np.float32(out_scale), *out)
    op = Lookup(function, PARAMETERS.get(function, 0.0))
    step = FunctionOfCodes("source", op, source).rounded("output", target)
    codes = np.arange(source.low, source.high + 1)
    rounding = exact_rounding(step, source, target, codes)
    if rounding is None:
        return
    x = codes * float(source.scale)
    true, _ = evaluated(op.function, op.parameter, x)
    bounded = FUNCTIONS[function].bound > 0
    most = ERROR_OF_BOUNDED if bounded else ERROR_PER_MAGNITUDE * (1 + np.abs(x))
    random = np.random.default_rng(seed)
    wrong = (true + most * random.uniform(-1, 1, len(x))).astype(np.float32)
    # As ONNX Runtime computes it, and as XNNPACK does.
    divisor = np.float32(target.scale / np.float32(rounding.factor))
    divided = (wrong + np.float32(rounding.offset * divisor)) / divisor
    product = wrong * np.float32(rounding.factor) + np.float32(rounding.offset * target.scale)
    for steps in (divided, product * (np.float32(1) / target.scale)):
        got = np.clip(np.rint(steps), target.low, target.high)
        np.testing.assert_array_equal(got, step.table)
    if not rounding.clamps:
        assert np.rint(divided).min() >= target.low
        assert np.rint(divided).max() <= target.high


def test_nearly_every_function_can_be_rounded_so() -> None:
    """What cannot is a slow table in ONNX, and an error in ExecuTorch."""
    random = np.random.default_rng(0)
    for function, known in FUNCTIONS.items():
        found = []
        for clip, out_clip in random.uniform(2, 8, (200, 2)):
            source = CodeFormat(np.float32(clip / 127), -127, 127)
            low, high = (-127, 127) if known.negative else (0, 255)
            target = CodeFormat(np.float32((known.bound or out_clip) / high), low, high)
            op = Lookup(function, PARAMETERS.get(function, 0.0))
            step = FunctionOfCodes("source", op, source).rounded("output", target)
            found.append(exact_rounding(step, source, target, np.arange(-127, 128)) is not None)
        assert np.mean(found) > 0.97, function


X = np.linspace(-20, 20, 40_001, dtype=np.float32)
OPS = {function: Lookup(function, PARAMETERS.get(function, 0.0)) for function in FUNCTIONS}


def by_onnx_runtime() -> dict[str, NDArray[np.float32]]:
    writer = OnnxWriter()
    values = {function: onnx_function(writer, op, "x") for function, op in OPS.items()}
    shape: list[str | int] = ["N"]
    graph = helper.make_graph(
        writer.nodes,
        "functions",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in values.values()],
        list(writer.constants.values()),
    )
    opset = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=IR_VERSION)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(list(values.values()), {"x": X})
    return dict(zip(values, found, strict=True))


class Functions(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch_function(op, x) for op in OPS.values())


def by_xnnpack() -> dict[str, NDArray[np.float32]]:
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import EdgeCompileConfig, to_edge
        from executorch.runtime import Runtime

        exported = torch.export.export(Functions(), (torch.from_numpy(X),))
        config = EdgeCompileConfig(preserve_ops=[torch.ops.aten.hardswish.default])
        edge = to_edge(exported, compile_config=config).to_backend(XnnpackPartitioner())
        data = bytes(edge.to_executorch().buffer)
        program = Runtime.get().load_program(data)
        found = program.load_method("forward").execute([torch.from_numpy(X)])
        return {function: each.numpy().copy() for function, each in zip(OPS, found, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("runtime", [by_onnx_runtime, by_xnnpack])
def test_the_runtimes_err_by_less(runtime: Callable[[], dict[str, NDArray[np.float32]]]) -> None:
    for function, found in runtime().items():
        true, _ = evaluated(function, OPS[function].parameter, X)
        bounded = FUNCTIONS[function].bound > 0
        most = ERROR_OF_BOUNDED if bounded else ERROR_PER_MAGNITUDE * (1 + np.abs(X))
        assert (np.abs(found - true) / most).max() <= 0.5, function


def halves() -> DeployedModel:
    """The image, which has all 256 codes, halved where it is below zero: ties that go up and down in turn."""
    nodes = (
        Node("flat", Flatten(), (INPUT,)),
        Node("half", Lookup("leaky_relu", 0.5), ("flat",)),
        Node("classes", Linear(256, 3, True), ("half",)),
    )
    graph = place_quantizers(Graph("halves", Input(1, 16, 16, 0.03125, 128), nodes, "classes"), 4)
    weights = np.random.default_rng(0).normal(size=(3, 256)).astype(np.float32)
    layers = {"classes": QuantizedLayer.from_weights(weights, 8, "max", False)}
    clip = np.asarray(np.float32(0.03125) * np.float32(127))
    side = {"half.quantized.clip": clip, "classes.bias": np.zeros(3, np.float32)}
    return DeployedModel(graph, layers, side, ("a", "b", "c"))


def test_ties_that_no_factor_moves_are_a_table_in_onnx(tmp_path: Path) -> None:
    model, pixels = halves(), np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1)
    path = export_model(model, tmp_path / "model.onnx", target="onnx").path
    expected = trace_values(model.program, pixels)["half.quantized"]
    np.testing.assert_array_equal(values(path, model, pixels)["half.quantized"], expected)


def test_xnnpack_has_no_tables(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"leaky_relu before 'half.quantized' has codes next to a tie"):
        export_model(halves(), tmp_path / "model.pte", target="executorch-uncompressed")
