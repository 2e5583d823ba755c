"""The same model in torch: fp32 and fake quantization, both channels_last and with torch's fused SGD.

Of torch's three SGDs the fused one is the fastest on a CPU. Images are floats before the clock starts.
"""

from __future__ import annotations

from itertools import cycle, islice

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from bench.workload import CLASSES, LEARNING_RATE, Train, Workload
from fedmpq.model import zoo
from fedmpq.model.module_input import as_taken

ACTIVATION_CLIP = 3.0

FloatBatch = tuple[Tensor, Tensor]


class FakeWeight(nn.Module):
    """Rounds a weight to 8 bits with the scale max|w| / 127; gradients pass straight through."""

    def forward(self, weight: Tensor) -> Tensor:
        scale = weight.detach().abs().amax() / 127
        return torch.fake_quantize_per_tensor_affine(
            weight, scale, torch.zeros((), dtype=torch.int32), -127, 127
        )


def _fake_activation(x: Tensor) -> Tensor:
    """Rounds to 4 bits between 0 and a fixed clip: no observer, the least that fake quantization can cost."""
    return torch.fake_quantize_per_tensor_affine(x, ACTIVATION_CLIP / 15, 0, 0, 15)


def float_module(work: Workload) -> nn.Module:
    torch.manual_seed(0)
    module = zoo.build(work.graph.name, classes=CLASSES, channels=work.graph.input.channels)
    return module.to(memory_format=torch.channels_last).train()  # type: ignore[no-any-return, call-overload]


def fake_quantized(module: nn.Module) -> fx.GraphModule:
    """The module with every convolution's and linear layer's weight and every ReLU's output rounded."""
    traced = fx.symbolic_trace(module)
    for layer in list(traced.modules()):
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Linear):
            parametrize.register_parametrization(layer, "weight", FakeWeight())
    modules = dict(traced.named_modules())
    for node in list(traced.graph.nodes):
        called = modules.get(str(node.target)) if node.op == "call_module" else node.target
        if called is torch.relu or isinstance(called, nn.ReLU | nn.ReLU6):
            with traced.graph.inserting_after(node):
                rounded = traced.graph.call_function(_fake_activation, (node,))
            node.replace_all_uses_with(rounded, delete_user_cb=lambda user, own=rounded: user is not own)
    traced.recompile()
    return traced


def trainer(module: nn.Module, batches: list[FloatBatch]) -> Train:
    """Steps of SGD with momentum 0.9 and weight decay 5e-4."""
    optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE, 0.9, weight_decay=5e-4, fused=True)
    endless = cycle([(as_taken(module, images), labels) for images, labels in batches])

    def train(steps: int) -> None:
        for images, labels in islice(endless, steps):
            optimizer.zero_grad()
            functional.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return train


def float_batches(work: Workload) -> list[FloatBatch]:
    """The images' real values, channels last in memory."""
    image = work.graph.input
    return [
        (
            (torch.from_numpy(images).float() - image.zero_point).mul_(image.scale).permute(0, 3, 1, 2),
            torch.from_numpy(labels),
        )
        for images, labels in work.batches
    ]
