"""Exported ONNX models in ONNX Runtime on emulated boards, whose integer kernels are not this CPU's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedmpq.export.onnx.lowering import lower_to_onnx
from fedmpq.export.verify import random_images
from tests.export.models import deployed

OnBoard = Callable[..., str]

# Network and bit-widths, repeated over its layers: narrow and wide first layers, every width, depthwise.
MODELS = {
    "mixed": ("resnet8", (4, 1, 2, 3, 5, 6, 7, 8)),
    "wide": ("resnet8", (8, 7)),
    "narrow": ("resnet20", (6, 5, 3, 4)),
    "depthwise": ("mobilenet_v2", (6, 8, 4, 7, 2)),
}
SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from fedmpq.export.onnx.runtime import OnnxRunner
for path in sorted(Path(sys.argv[1]).glob("*.onnx")):
    np.save(path.with_suffix(".logits.npy"), OnnxRunner(path).logits(np.load(path.with_suffix(".npy"))))
"""


@pytest.fixture(scope="module")
def logits_there(on_board: OnBoard, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models, their images, and the logits that the board computed of them."""
    folder = tmp_path_factory.mktemp("models")
    for name, (network, widths) in MODELS.items():
        model = deployed(network, widths)
        content = lower_to_onnx(model.program, model.layers, {"classes": model.class_names}).to_bytes()
        (folder / f"{name}.onnx").write_bytes(content)
        np.save(folder / f"{name}.npy", random_images(model.graph, 6))
    on_board("-c", SCRIPT, folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_the_board_is_the_reference_to_the_bit(logits_there: Path, name: str) -> None:
    network, widths = MODELS[name]
    model = deployed(network, widths)
    images = np.load(logits_there / f"{name}.npy")
    np.testing.assert_array_equal(
        np.load(logits_there / f"{name}.logits.npy"), model.logits(images), strict=True
    )
