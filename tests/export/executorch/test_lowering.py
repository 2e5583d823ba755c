"""ExecuTorch: XNNPACK takes the whole model and computes the reference's codes."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.export.executorch import lowering
from fedmpq.export.executorch.lowering import lower_to_executorch
from fedmpq.export.executorch.runtime import ExecuTorchRunner
from fedmpq.export.executorch.verification import values as executorch_values
from fedmpq.export.exporting import export_model
from fedmpq.export.float_network import float_network, normalised
from fedmpq.export.format import MAX_BATCH, ExportError
from fedmpq.export.operations import RoundedLayer, operations
from fedmpq.export.targets import TARGETS
from fedmpq.export.verify import first_difference, random_images
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.integer_forward import logits
from fedmpq.model.quantized import dequantize_all
from tests.export.models import deployed, users_model


def check_codes(model: DeployedModel) -> None:
    images = random_images(model.graph, 5)
    values = executorch_values(model, images)
    assert values.keys() | {"input"} == model.program.formats.keys()
    assert first_difference(model.program, images, values) is None


def test_every_code_of_a_residual_network_is_equal() -> None:
    check_codes(deployed("resnet8", (1, 2, 3, 4, 5, 6, 7, 8), per_channel=True))


def test_every_code_with_eight_bit_activations_is_equal() -> None:
    check_codes(deployed("digits_cnn", (8, 6), activation_bits=8))


def test_every_code_of_a_users_network_is_equal() -> None:
    check_codes(users_model())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeployedModel, Path]:
    model = deployed("digits_cnn", (4, 2))
    return model, export_model(model, tmp_path_factory.mktemp("models") / "small.pte.xz").path


def test_an_exported_file_takes_any_batch(exported: tuple[DeployedModel, Path]) -> None:
    model, path = exported
    assert path.name == "small.pte.xz"
    runner = ExecuTorchRunner(path)
    assert runner.image_shape == (8, 8, 3)
    for count in (1, 7, MAX_BATCH, MAX_BATCH + 3):
        images = random_images(model.graph, max(2, count))[:count]
        np.testing.assert_array_equal(runner.logits(images), logits(model.program, images), strict=True)


def test_damaged_files_are_refused(exported: tuple[DeployedModel, Path], tmp_path: Path) -> None:
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
    monkeypatch.setattr(lowering, "FORMAT", 2)
    with pytest.raises(ExportError, match="has format 2"):
        ExecuTorchRunner(lower_to_executorch(model.program, model.layers))


def test_a_mismatch_deletes_the_file_and_names_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = operations

    def wrong(*arguments: Any) -> Any:
        for step in real(*arguments):
            if isinstance(step, RoundedLayer) and step.sums.layer == "layer2.0.conv1":
                step.sums.bias[:] += 1000
            yield step

    monkeypatch.setattr(lowering, "operations", wrong)
    with pytest.raises(ExportError, match=r"ExecuTorch computes 'relu_3.quantized' of 'digits_cnn'"):
        export_model(deployed("digits_cnn", (4, 3)), tmp_path / "wrong.pte.xz")
    assert not list(tmp_path.iterdir())


def test_an_uncompressed_file_is_what_the_compressed_one_holds(
    exported: tuple[DeployedModel, Path], tmp_path: Path
) -> None:
    """Stock loaders take it as it is."""
    model, compressed = exported
    plain = export_model(model, tmp_path / "small.pte")
    assert (plain.card["target"], plain.card["suffix"]) == ("executorch-uncompressed", ".pte")
    assert plain.path.read_bytes() == lzma.decompress(compressed.read_bytes())
    images = random_images(model.graph, 3)
    np.testing.assert_array_equal(
        ExecuTorchRunner(plain.path).logits(images), ExecuTorchRunner(compressed).logits(images)
    )


@pytest.mark.parametrize("make", [lambda: deployed("digits_cnn", (4,)), users_model])
def test_the_fp32_twin_is_one_network_in_every_runtime(make: Callable[[], DeployedModel]) -> None:
    """What a file's speed is compared with."""
    model = make()
    network = float_network(model.graph, dequantize_all(model.layers), model.side)
    images = normalised(model.graph, random_images(model.graph, 3))
    expected = TARGETS["onnx"].float_twin(network)(images)
    got = TARGETS["executorch"].float_twin(network)(images)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
