"""The torchvision classifiers that docs/models.md tells about, untrained and quantized."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bench.workload import CLASSES, Workload, quantized
from fedmpq.system.torchvision_ops import import_torchvision

STANDARD = 224


@dataclass(frozen=True)
class Classifier:
    """How torchvision builds one, and the sides of its images in pixels."""

    small: int = 64
    standard: int = STANDARD
    settings: dict[str, Any] = field(default_factory=dict)


# Their second and third outputs are for training in fp32 alone.
_ONE_OUTPUT = {"aux_logits": False, "init_weights": False}

CLASSIFIERS: dict[str, Classifier] = {
    "alexnet": Classifier(),
    "vgg11": Classifier(),
    "vgg11_bn": Classifier(),
    "squeezenet1_1": Classifier(),
    "densenet121": Classifier(),
    "googlenet": Classifier(settings=_ONE_OUTPUT),
    "inception_v3": Classifier(96, 299, _ONE_OUTPUT),
    "resnet18": Classifier(),
    "resnet50": Classifier(),
    "resnext50_32x4d": Classifier(),
    "wide_resnet50_2": Classifier(),
    "mobilenet_v2": Classifier(),
    "mobilenet_v3_small": Classifier(),
    "mobilenet_v3_large": Classifier(),
    "mnasnet0_5": Classifier(),
    "shufflenet_v2_x0_5": Classifier(),
    "efficientnet_b0": Classifier(),
    "efficientnet_v2_s": Classifier(),
    "regnet_y_400mf": Classifier(),
    "regnet_x_400mf": Classifier(),
    "convnext_tiny": Classifier(),
    # Its positions are learnt for one size of image.
    "vit_b_16": Classifier(small=STANDARD),
    "swin_t": Classifier(),
}
"""By torchvision's name."""


def module_of(name: str) -> torch.nn.Module:
    """The network with random weights, the same each time."""
    torch.manual_seed(0)
    built: torch.nn.Module = getattr(import_torchvision().models, name)(
        weights=None, num_classes=CLASSES, **CLASSIFIERS[name].settings
    )
    return built


def workload_of(name: str, module: torch.nn.Module, size: int, batch: int) -> Workload:
    """The network quantized as for a client of 4 bits per weight, and one batch of random images."""
    graph, layers, side = quantized(module, name, (3, size, size))
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
    return Workload(graph, layers, side, ((images, random.integers(0, CLASSES, batch)),))
