"""Networks of torchvision that are made of functions and products trace as they are."""

from __future__ import annotations

import pytest
import torch

from fedmpq.model.graph import Graph, Lookup, Mul
from fedmpq.model.trace import trace
from fedmpq.system.torchvision_ops import import_torchvision


def traced(name: str) -> Graph:
    module = getattr(import_torchvision().models, name)(weights=None, num_classes=3)
    return trace(module, torch.zeros(1, 3, 32, 32), name=name, input_scale=0.1, input_zero_point=7)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "functions", "products"),
    [
        ("mobilenet_v3_small", {"hardswish", "hardsigmoid"}, 9),
        ("regnet_y_400mf", {"sigmoid"}, 16),
        ("efficientnet_b0", {"silu", "sigmoid"}, 16),
        ("mnasnet0_5", set(), 0),
    ],
)
def test_they_trace(name: str, functions: set[str], products: int) -> None:
    ops = [node.op for node in traced(name).nodes]
    assert {op.function for op in ops if isinstance(op, Lookup)} == functions
    assert sum(isinstance(op, Mul) for op in ops) == products
