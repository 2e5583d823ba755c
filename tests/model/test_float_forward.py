"""The float forward against the module that the graph was traced from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedmpq.model.float_forward import float_logits, float_values
from fedmpq.model.graph import INPUT, Quantize
from fedmpq.model.module_state import initial_state
from fedmpq.model.trace import trace

SCALE, ZERO = 1 / 64, 120


class Everything(nn.Module):
    """Every operation of a graph, with what it can be given: groups, dilation, strides, padding, bias."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, (3, 2), padding=(1, 0), bias=True)
        self.bn = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, stride=(2, 1), padding=1, groups=8, bias=False)
        self.last = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8, 7)
        self.fc = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu6(self.bn(self.stem(x)))
        x = torch.relu(self.norm(self.grouped(x)) + x)
        x = nn.functional.max_pool2d(x, 3, stride=2, padding=1)
        x = torch.relu(self.last(self.depthwise(x)))
        x = nn.functional.avg_pool2d(x, 2, stride=1, padding=1)
        x = torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1)
        logits: torch.Tensor = self.fc(torch.relu(self.hidden(x)))
        return logits


def randomised(module: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            nn.init.normal_(part.running_mean, 0.0, 0.3)
            nn.init.uniform_(part.running_var, 0.3, 2.0)
            nn.init.normal_(part.weight, 1.0, 0.2)
            nn.init.normal_(part.bias, 0.0, 0.2)
    return module.eval()


@pytest.mark.parametrize("count", [1, 5])
def test_it_is_the_module(count: int) -> None:
    module = randomised(Everything())
    graph = trace(module, torch.zeros(1, 3, 9, 8), name="n", input_scale=SCALE, input_zero_point=ZERO)
    weights, side = initial_state(module, graph)
    images = np.random.default_rng(0).integers(0, 256, (count, 9, 8, 3), dtype=np.uint8)
    real = (images.astype(np.float32) - ZERO) * np.float32(SCALE)
    with torch.no_grad():
        expected = module(torch.from_numpy(real).permute(0, 3, 1, 2)).numpy()
    np.testing.assert_allclose(float_logits(graph, weights, side, images), expected, rtol=1e-4, atol=1e-5)


def test_quantizers_hand_on_what_they_read_and_every_node_comes_once() -> None:
    module = randomised(Everything())
    graph = trace(module, torch.zeros(1, 3, 9, 8), name="n", input_scale=SCALE, input_zero_point=ZERO)
    images = np.full((2, 9, 8, 3), 200, np.uint8)
    values = dict[str, np.ndarray]()
    for node, value in float_values(graph, *initial_state(module, graph), images):
        assert node.name not in values
        values[node.name] = value
        if isinstance(node.op, Quantize) and node.inputs[0] != INPUT:
            assert value is values[node.inputs[0]] or np.array_equal(value, values[node.inputs[0]])
    assert list(values) == [node.name for node in graph.nodes]
