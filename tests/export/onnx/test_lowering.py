"""ONNX: equal to the integer reference to the bit for any mix of bit-widths, small, safe from saturation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import numpy_helper

from fedmpq.export.card import bare_bytes
from fedmpq.export.exporting import LabelledImages, export_model
from fedmpq.export.format import METADATA_KEY, ExportError
from fedmpq.export.onnx import lowering
from fedmpq.export.onnx.lowering import OnnxModel, lower_to_onnx
from fedmpq.export.onnx.runtime import OnnxRunner
from fedmpq.export.onnx.verification import check_optimized
from fedmpq.export.operations import mirrored
from fedmpq.export.verify import random_images
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.integer_forward import logits
from fedmpq.model.integer_program import IntegerProgram
from fedmpq.model.quantized import QuantizedLayer
from tests.export.models import CLASSES, deployed, users_model

EXAMPLES = {
    "digits_cnn": 25,
    "resnet8": 12,
    "resnet20": 8,
    "resnet44": 4,
    "resnet18": 3,
    "mobilenet_v2": 4,
    "ds_cnn": 4,
    "mobilenet_v3_small": 2,
    "shufflenet_v2_x0_5": 2,
    "squeezenet1_1": 3,
}
"""Of each network of the zoo, so many mixes; `bench.coverage` exports every kind of torchvision's."""
MIXES = st.lists(st.integers(1, 8), min_size=1, max_size=60)


def lowered(model: DeployedModel) -> bytes:
    metadata = {"classes": model.class_names, "graph": model.graph.id}
    return lower_to_onnx(model.program, model.layers, metadata).to_bytes()


def reference(model: DeployedModel, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Without the native products that verification itself uses."""
    return logits(model.program, images)


def check_equal(model: DeployedModel, count: int = 3) -> None:
    images = random_images(model.graph, count)
    got = OnnxRunner(lowered(model)).logits(images)
    np.testing.assert_array_equal(got, reference(model, images), strict=True)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_mix_of_bit_widths_is_equal_to_the_bit(name: str) -> None:
    @settings(max_examples=EXAMPLES[name], suppress_health_check=list(HealthCheck))
    @given(widths=MIXES, seed=st.integers(0, 1000), per_channel=st.booleans())
    def check(widths: list[int], seed: int, per_channel: bool) -> None:
        check_equal(deployed(name, widths, seed, per_channel))

    check()


@pytest.mark.parametrize("activation_bits", [1, 3, 8])
def test_other_activation_widths(activation_bits: int) -> None:
    check_equal(deployed("resnet8", (4, 8, 1, 7), activation_bits=activation_bits))


@pytest.mark.parametrize("seed", range(4))
def test_a_users_network(seed: int) -> None:
    check_equal(users_model(seed), count=9)


def test_a_batch_may_be_empty() -> None:
    model = deployed("resnet8", (4,))
    none = random_images(model.graph, 2)[:0]
    assert OnnxRunner(lowered(model)).logits(none).shape == (0, len(CLASSES))


def test_no_wide_weight_is_int8(tmp_path: Path) -> None:
    """On CPUs that add pairs of products in 16 bits, int8 weights beyond ±63 give wrong sums."""
    content = lowered(deployed("resnet8", (1, 2, 3, 4, 5, 6, 7, 8)))
    optimized = tmp_path / "optimized.onnx"
    OnnxRunner(content, optimized=optimized)
    graph = onnx.load(optimized).graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = [constants[n.input[3]] for n in graph.node if n.op_type == "QLinearConv"]
    weights += [constants[n.input[3]] for n in graph.node if n.op_type == "QGemm"]
    assert len(weights) == 11
    assert {str(weight.dtype) for weight in weights} == {"int8", "uint8"}
    for weight in weights:
        assert weight.dtype == np.uint8 or np.abs(weight.astype(int)).max() <= 63


def test_nothing_is_left_to_unpack_and_every_layer_is_integer(tmp_path: Path) -> None:
    model = deployed("mobilenet_v2", (2, 5, 8))
    content = lowered(model)
    OnnxRunner(content, optimized=tmp_path / "optimized.onnx")
    check_optimized(tmp_path / "optimized.onnx", model)
    (tmp_path / "raw.onnx").write_bytes(content)
    with pytest.raises(ExportError, match="ONNX Runtime leaves Conv in"):
        check_optimized(tmp_path / "raw.onnx", model)


def test_files_are_about_as_small_as_their_bits() -> None:
    """Few codes are outliers here; what that saves is more than biases, multipliers and the graph take."""
    model = deployed("resnet20", (4,))
    assert len(lowered(model)) <= bare_bytes(model)


def test_a_graph_takes_little_beside_weights_biases_and_multipliers() -> None:
    """With every code as likely as any other: bits of the weights, and six bytes for each channel."""
    model = deployed("resnet20", (4,))
    random = np.random.default_rng(0)
    layers = {
        name: replace(layer, codes=random.integers(0, 2**layer.bits, layer.codes.shape, dtype=np.uint8))
        for name, layer in model.layers.items()
    }
    channels = sum(len(layer.codes) for layer in layers.values())
    flat = replace(model, layers=layers)
    assert len(lowered(flat)) <= bare_bytes(flat) + 6 * channels + 6500
    check_equal(flat)


def test_exporting_writes_a_verified_file_and_its_card(tmp_path: Path) -> None:
    model = deployed("digits_cnn", (4, 3))
    images = random_images(model.graph, 20, seed=5)
    tests = LabelledImages(images, reference(model, images).argmax(axis=1).astype(np.int64))
    exported = export_model(model, tmp_path / "deep" / "small.onnx", tests=tests)
    assert exported.path == tmp_path / "deep" / "small.onnx"
    assert {path.name for path in exported.path.parent.iterdir()} == {"small.onnx", "small.onnx.json"}
    card = json.loads((tmp_path / "deep" / "small.onnx.json").read_text(encoding="utf-8"))
    assert card == json.loads(json.dumps(exported.card))
    assert (card["accuracy"], card["round"], card["graph"]) == (1.0, 3, model.graph.id)
    assert (card["file_bytes"], card["verified_images"]) == (exported.path.stat().st_size, 36)
    assert OnnxRunner(exported.path).class_names == list(CLASSES)


def tampered(layers: Mapping[str, QuantizedLayer], name: str) -> dict[str, QuantizedLayer]:
    """With the signs of all weights of one layer changed."""
    layer = layers[name]
    return {**layers, name: replace(layer, codes=mirrored(layer.codes, layer.bits))}


def test_a_mismatch_deletes_the_file_and_names_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(
        program: IntegerProgram, layers: Mapping[str, QuantizedLayer], metadata: Mapping[str, Any]
    ) -> OnnxModel:
        return lower_to_onnx(program, tampered(layers, "layer2.0.conv1"), metadata)

    monkeypatch.setattr(lowering, "lower_to_onnx", wrong)
    with pytest.raises(ExportError, match=r"ONNX Runtime computes 'relu_3.quantized' of 'digits_cnn'"):
        export_model(deployed("digits_cnn", (4, 3)), tmp_path / "wrong.onnx")
    assert not list(tmp_path.iterdir())


def test_class_names_of_another_graph_are_refused(tmp_path: Path) -> None:
    model = deployed("digits_cnn", (4,))
    other = replace(model, class_names=("cat", "dog"))
    with pytest.raises(ExportError, match="2 class names for the 7 outputs of 'digits_cnn'"):
        export_model(other, tmp_path / "other.onnx")


# Files that are not what they should be


def with_metadata(content: bytes, text: str | None) -> bytes:
    model = onnx.load_from_string(content)
    del model.metadata_props[:]
    if text is not None:
        model.metadata_props.add(key=METADATA_KEY, value=text)
    return model.SerializeToString()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no model of fedmpq"),
        ('{"format": 2}', "has format 2, and this fedmpq reads format 1: update fedmpq"),
        ('{"format": "new"}', "has format 'new'"),
        ("[]", "no readable description"),
        ('{"format": 1}', "names no classes; export it again"),
        ("{", "no readable description"),
    ],
)
def test_other_versions_are_refused(text: str | None, message: str) -> None:
    content = lowered(deployed("digits_cnn", (4,)))
    with pytest.raises(ExportError, match=message):
        OnnxRunner(with_metadata(content, text))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    content = lowered(deployed("digits_cnn", (4,)))
    path = tmp_path / "cut.onnx"
    for size in (0, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ExportError, match=r"cut\.onnx"):
            OnnxRunner(path)
    with pytest.raises(ExportError, match="there is no model at"):
        OnnxRunner(tmp_path / "missing.onnx")
