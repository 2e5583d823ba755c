"""The target `onnx`. Loads onnx and ONNX Runtime only when it is used: a board has the runtime alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedmpq.export.target import FloatRun, Images, Runner
from fedmpq.model.export_formats import SUFFIXES

if TYPE_CHECKING:
    # A board that only runs files loads nothing of what makes them.
    from fedmpq.export.float_network import FloatNetwork
    from fedmpq.model.deployed import DeployedModel


class OnnxTarget:
    """ONNX files of standard operators, each layer's weights as packed bit-planes."""

    name = "onnx"
    suffix = SUFFIXES[name]
    runtime = "onnxruntime"

    def lower(self, model: DeployedModel) -> bytes:
        from fedmpq.export.card import task_facts
        from fedmpq.export.onnx.lowering import lower_to_onnx

        metadata = {"graph": model.graph.id, "classes": model.class_names, **task_facts(model), **model.facts}
        return lower_to_onnx(model.program, model.layers, metadata).to_bytes()

    def run(self, path: Path, threads: int = 1) -> Runner:
        from fedmpq.export.onnx.runtime import OnnxRunner

        return OnnxRunner(path, threads)

    def verify(self, path: Path, model: DeployedModel, images: Images) -> None:
        from fedmpq.export.onnx.verification import verify

        verify(path, model, images)

    def float_twin(self, network: FloatNetwork) -> FloatRun:
        from fedmpq.export.onnx.float_twin import lower_float
        from fedmpq.export.onnx.runtime import float_session

        return float_session(lower_float(network).SerializeToString())
