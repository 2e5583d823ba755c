"""What a float module does not have: where the clips of activations begin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedmpq.model.graph import Quantize
from fedmpq.model.module_state import initial_state
from fedmpq.model.trace import trace


class Branches(nn.Module):
    """A ReLU, a bounded one, and a sum of two branches behind another ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.second, self.second_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.third, self.third_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        plain = torch.relu(self.first(x))
        bounded = nn.functional.relu6(self.second_norm(self.second(plain)))
        joined = torch.relu(self.third_norm(self.third(bounded)) + plain)
        return self.last(joined.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("factor", "relu", "bounded", "total"),
    [(1.0, 3.0, 3.0, 4.0), (2.0, 6.0, 6.0, 8.0), (3.0, 9.0, 6.0, 12.0)],
)
def test_clips_begin_at_multiples_but_never_above_what_a_value_can_be(
    factor: float, relu: float, bounded: float, total: float
) -> None:
    module = Branches()
    graph = trace(module, torch.zeros(1, 3, 5, 5), name="branches", input_scale=0.1, input_zero_point=0)
    _, side = initial_state(module, graph, factor)
    begun = [
        (node.op.signed, side[f"{node.name}.clip"]) for node in graph.nodes if isinstance(node.op, Quantize)
    ]
    signed = {float(clip) for has_sign, clip in begun if has_sign}
    others = sorted(float(clip) for has_sign, clip in begun if not has_sign)
    assert signed == {6.0}, "BatchNorm's outputs are as wide as ever"
    assert others == sorted([relu, bounded, total])
    assert all(clip.dtype == np.float32 for _, clip in begun)
