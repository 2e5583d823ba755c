"""ExecuTorch: XNNPACK takes the whole model and computes the reference's codes."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmpq.export import executorch_lowering, verify
from fedmpq.export.executorch_lowering import lower_to_executorch
from fedmpq.export.executorch_runtime import ExecuTorchRunner
from fedmpq.export.exporting import Deployed, export_model
from fedmpq.export.float_executorch import lower_float_to_executorch
from fedmpq.export.float_onnx import lower_float, normalised
from fedmpq.export.format import MAX_BATCH, ExportError
from fedmpq.export.onnx_runtime import float_session
from fedmpq.export.operations import RoundedLayer, operations
from fedmpq.model.integer_forward import logits
from fedmpq.model.integer_program import compile_program
from fedmpq.model.quantized import dequantize_all
from tests.export.models import deployed
from tests.export.test_onnx import users_model


def check_codes(model: Deployed) -> None:
    program = compile_program(model.graph, model.layers, model.side)
    images = verify.random_images(program, 5)
    values = verify.executorch_values(program, model.layers, images)
    assert values.keys() | {"input"} == program.formats.keys()
    assert verify.first_difference(program, images, values) is None


def test_every_code_of_a_residual_network_is_equal() -> None:
    check_codes(deployed("resnet8", (1, 2, 3, 4, 5, 6, 7, 8), per_channel=True))


def test_every_code_with_eight_bit_activations_is_equal() -> None:
    check_codes(deployed("digits_cnn", (8, 6), activation_bits=8))


def test_every_code_of_a_users_network_is_equal() -> None:
    check_codes(users_model())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Deployed, Path]:
    model = deployed("digits_cnn", (4, 2))
    stem = tmp_path_factory.mktemp("models") / "small"
    return model, export_model(model, "executorch", stem, measure_speed=False).path


def test_an_exported_file_takes_any_batch(exported: tuple[Deployed, Path]) -> None:
    model, path = exported
    assert path.name == "small.pte.xz"
    program = compile_program(model.graph, model.layers, model.side)
    runner = ExecuTorchRunner(path)
    for count in (1, 7, MAX_BATCH, MAX_BATCH + 3):
        images = verify.random_images(program, max(2, count))[:count]
        expected = logits(program, images)
        np.testing.assert_allclose(
            runner.logits(images), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
        )


def test_damaged_files_are_refused(exported: tuple[Deployed, Path], tmp_path: Path) -> None:
    _, path = exported
    content = path.read_bytes()
    cut = tmp_path / "cut.pte.xz"
    for damaged in (b"", content[: len(content) // 2], b"not xz", lzma.compress(b"no program")):
        cut.write_bytes(damaged)
        with pytest.raises(ExportError, match=r"cut\.pte\.xz"):
            ExecuTorchRunner(cut)
    with pytest.raises(ExportError, match="there is no model at"):
        ExecuTorchRunner(tmp_path / "missing.pte.xz")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = deployed("digits_cnn", (4, 2))
    program = compile_program(model.graph, model.layers, model.side)
    monkeypatch.setattr(executorch_lowering, "FORMAT", 2)
    with pytest.raises(ExportError, match="has format 2"):
        ExecuTorchRunner(lower_to_executorch(program, model.layers))


def test_a_mismatch_deletes_the_file_and_names_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = operations

    def wrong(*arguments: Any) -> Any:
        for step in real(*arguments):
            if isinstance(step, RoundedLayer) and step.sums.layer == "layer2.0.conv1":
                step.sums.bias[:] += 1000
            yield step

    monkeypatch.setattr(executorch_lowering, "operations", wrong)
    with pytest.raises(ExportError, match=r"ExecuTorch computes 'relu_3.quantized' of 'digits_cnn'"):
        export_model(deployed("digits_cnn", (4, 3)), "executorch", tmp_path / "wrong")
    assert not list(tmp_path.iterdir())


def test_the_fp32_twin_is_the_network_that_onnx_runtime_runs() -> None:
    """What a file's speed is compared with in its own runtime."""
    model = deployed("digits_cnn", (4,))
    weights = dequantize_all(model.layers)
    program = compile_program(model.graph, model.layers, model.side)
    images = normalised(model.graph, verify.random_images(program, 3))
    pte = lower_float_to_executorch(model.graph, weights, model.side)
    (got,) = ExecuTorchRunner(pte).run(torch.from_numpy(images))
    expected = float_session(lower_float(model.graph, weights, model.side).SerializeToString())(images)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
