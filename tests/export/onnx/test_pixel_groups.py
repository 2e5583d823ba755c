"""The first convolution over groups of pixels: the same codes as pixel by pixel, for any geometry."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx.inliner import inline_local_functions

from fedmpq.export.onnx.lowering import lower_to_onnx
from fedmpq.export.onnx.pixel_groups import PIXELS, pixel_groups
from fedmpq.export.onnx.runtime import OnnxRunner
from fedmpq.export.verify import random_images
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import INPUT, Conv2d, Flatten, Graph, Input, Linear, Node, Relu
from fedmpq.model.integer_forward import logits
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.quantizers import place_quantizers


def convolution(
    channels: int = 3,
    kernel: tuple[int, int] = (3, 3),
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (1, 1),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Conv2d:
    return Conv2d(channels, 3 * groups, kernel, stride, padding, dilation, groups, True)


def model_of(op: Conv2d, height: int, width: int, bits: int) -> DeployedModel:
    sides = [
        (side + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for side, padding, dilation, kernel, stride in zip(
            (height, width), op.padding, op.dilation, op.kernel, op.stride, strict=True
        )
    ]
    nodes = (
        Node("first", op, (INPUT,)),
        Node("relu", Relu(0.0), ("first",)),
        Node("flat", Flatten(), ("relu",)),
        Node("last", Linear(op.out_channels * sides[0] * sides[1], 4, True), ("flat",)),
    )
    graph = place_quantizers(Graph("one", Input(op.in_channels, height, width, 0.25, 97), nodes, "last"), 4)
    random = np.random.default_rng(bits)
    layers = {
        node.name: QuantizedLayer.from_weights(
            random.normal(size=graph.weight_shape(node.name)).astype(np.float32), bits, "max", True
        )
        for node in graph.layers
    }
    side = {
        name: np.asarray(random.uniform(0.5, 3, shape), np.float32)
        for name, shape in graph.side_shapes().items()
    }
    return DeployedModel(graph, layers, side, ("a", "b", "c", "d"))


def check(model: DeployedModel, *, grouped: bool) -> None:
    """Equal to the reference, and lowered in the way expected."""
    lowered = lower_to_onnx(model.program, model.layers, {"classes": model.class_names})
    found = Counter(node.op_type for node in inline_local_functions(lowered.proto).graph.node)
    # Biases and multipliers of a group are repeated, its weights spread; nothing else transposes the image.
    assert found["Tile"] == (2 if grouped else 0)
    assert found["Transpose"] == (4 if grouped else 1)
    images = random_images(model.graph, 3)
    np.testing.assert_array_equal(
        OnnxRunner(lowered.to_bytes()).logits(images), logits(model.program, images), strict=True
    )


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_geometry_is_equal_to_the_bit(data: st.DataObject) -> None:
    draw = data.draw
    stride = draw(st.sampled_from((1, 2, 4)))
    columns = draw(st.integers(1, 9))
    # Such paddings that an image as wide as strides go into it comes out.
    paddings = [p for p in range(columns) if 1 <= columns - 2 * p <= stride]
    if not paddings:
        columns, paddings = 3, [1]
    rows = draw(st.integers(1, 3))
    op = convolution(
        channels=draw(st.sampled_from((1, 2, 3, 5))),
        kernel=(rows, columns),
        stride=(draw(st.integers(1, 3)), stride),
        padding=(draw(st.integers(0, rows - 1)), draw(st.sampled_from(paddings))),
        dilation=(draw(st.integers(1, 2)), 1),
    )
    width = PIXELS * draw(st.integers(1, 4))
    check(model_of(op, 7, width, draw(st.integers(1, 6))), grouped=True)


@pytest.mark.parametrize(
    ("op", "width", "bits"),
    [
        (convolution(), 10, 4),  # not a whole number of groups
        (convolution(stride=(1, 3), padding=(1, 1)), 12, 4),  # a group has no whole number of outputs
        (convolution(padding=(1, 0)), 12, 4),  # the image comes out narrower
        (convolution(padding=(1, 2)), 12, 4),  # or wider
        (convolution(dilation=(1, 2), padding=(1, 2)), 12, 4),
        (convolution(groups=3), 12, 4),
        (convolution(channels=4), 12, 4),  # fast as it is
        (convolution(), 12, 7),  # no fast kernel takes uint8 weights
    ],
)
def test_other_convolutions_stay_as_they_are(op: Conv2d, width: int, bits: int) -> None:
    assert pixel_groups(op, width, bits) is None
    check(model_of(op, 7, width, bits), grouped=False)


def test_taps_by_hand() -> None:
    """Three columns, stride 2: outputs 0 and 1 of a group begin one pixel before it and one after."""
    groups = pixel_groups(convolution(stride=(2, 2)), 8, 4)
    assert groups is not None
    assert (groups.before, groups.after, groups.outputs) == (1, 0, 2)
    none = 3
    assert groups.taps.tolist() == [
        [[none, none, none, 0], [1, 2, none, none]],
        [[none, none, none, none], [none, 0, 1, 2]],
    ]
