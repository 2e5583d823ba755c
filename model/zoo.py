"""Networks by name, and the user's own by `package.module:function`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from fedmpq.model import tiny_networks
from fedmpq.model.graph import Graph
from fedmpq.model.module_input import as_taken
from fedmpq.system.named_object import NamedObjectError, load_attribute

if TYPE_CHECKING:
    import torch


class ModelError(ValueError):
    """A model name that leads to no network."""


def names() -> tuple[str, ...]:
    """The networks that come along."""
    return tuple(_ZOO)


def build(spec: str, *, classes: int, channels: int) -> torch.nn.Module:
    """A fresh network: one of `names()`, or what `package.module:function` returns.

    The user's function is called with `classes=` and `channels=` if it has such parameters; the current
    directory is importable. Initial weights come from torch's generator: seed it with `torch.manual_seed`.
    """
    if spec in _ZOO:
        return _ZOO[spec](classes=classes, channels=channels)
    if ":" not in spec:
        raise ModelError(f"no model is called {spec!r}; take {', '.join(_ZOO)} or 'package.module:function'")
    return _build_users(spec, classes=classes, channels=channels)


def graph_of(
    spec: str,
    *,
    classes: int,
    input_shape: tuple[int, int, int],
    activation_bits: int | None = 4,
    input_scale: float,
    input_zero_point: int,
) -> Graph:
    """The graph of `build(spec)` for images of `input_shape` (channels, height, width).

    Sequences are images of height 1; a network of one-dimensional layers is fed (N, channels, width).
    """
    import torch

    from fedmpq.model.trace import trace

    module = build(spec, classes=classes, channels=input_shape[0])
    return trace(
        module,
        as_taken(module, torch.zeros(1, *input_shape)),
        name=spec,
        activation_bits=activation_bits,
        input_scale=input_scale,
        input_zero_point=input_zero_point,
    )


def _build_users(spec: str, **offered: int) -> torch.nn.Module:
    import torch

    function = _import_function(spec)
    try:
        accepted = inspect.signature(function).parameters.values()
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted)
        wanted = {parameter.name for parameter in accepted if parameter.kind is not parameter.POSITIONAL_ONLY}
        module = function(**{name: value for name, value in offered.items() if takes_all or name in wanted})
    # Whatever the user's code raises: the cause is chained, the message says whose code it was.
    except Exception as error:
        raise ModelError(f"model {spec!r} failed with {_one_line(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"model {spec!r} returned a {type(module).__name__}, needs a torch.nn.Module")
    return module


def _import_function(spec: str) -> Callable[..., Any]:
    try:
        function = load_attribute(spec, "model")
    except NamedObjectError as error:
        raise ModelError(str(error)) from error
    if not callable(function):
        raise ModelError(
            f"model {spec!r} is a {type(function).__name__}, needs a function that builds a module"
        )
    return function


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def _residual_network(widths: Sequence[int], blocks: int, *, classes: int, channels: int) -> torch.nn.Module:
    """The CIFAR layout of He et al. (2016): 3x3 stem, `blocks` basic blocks per width, global mean, linear.

    Every stage but the first halves the image; where the shape changes, the shortcut is a 1x1 convolution
    with BatchNorm.
    """
    import torch
    from torch import nn

    # Classes live in here because importing this module must not import torch.
    class BasicBlock(nn.Module):
        def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(out_channels)
            self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
            self.bn2 = nn.BatchNorm2d(out_channels)
            self.shortcut = nn.Sequential()
            if stride != 1 or in_channels != out_channels:
                self.shortcut.append(nn.Conv2d(in_channels, out_channels, 1, stride, bias=False))
                self.shortcut.append(nn.BatchNorm2d(out_channels))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.bn1(self.conv1(x)))
            return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))

    class ResidualNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
            self.bn1 = nn.BatchNorm2d(widths[0])
            previous = widths[0]
            for index, width in enumerate(widths):
                first = BasicBlock(previous, width, stride=1 if index == 0 else 2)
                rest = [BasicBlock(width, width, stride=1) for _ in range(blocks - 1)]
                self.add_module(f"layer{index + 1}", nn.Sequential(first, *rest))
                previous = width
            self.fc = nn.Linear(previous, classes)
            for part in self.modules():
                if isinstance(part, nn.Conv2d):
                    nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.bn1(self.conv1(x)))
            for index in range(len(widths)):
                x = self.get_submodule(f"layer{index + 1}")(x)
            x = nn.functional.adaptive_avg_pool2d(x, 1)
            return self.fc(torch.flatten(x, 1))  # type: ignore[no-any-return]

    return ResidualNetwork()


def _torchvision_network(name: str, first: str, *, classes: int, channels: int) -> torch.nn.Module:
    """A torchvision network, untrained; its `first` convolution is refitted unless there are 3 channels."""
    import torch

    from fedmpq.system.torchvision_ops import import_torchvision

    module: torch.nn.Module = getattr(import_torchvision().models, name)(weights=None, num_classes=classes)
    if channels != 3:
        convolution = module.get_submodule(first)
        assert isinstance(convolution, torch.nn.Conv2d)
        convolution.in_channels = channels
        convolution.weight = torch.nn.Parameter(convolution.weight[:, :1].repeat(1, channels, 1, 1))
        torch.nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return module


_ZOO: dict[str, Callable[..., torch.nn.Module]] = {
    "digits_cnn": partial(_residual_network, (16, 32), 1),
    "resnet8": partial(_residual_network, (16, 32, 64), 1),
    "resnet20": partial(_residual_network, (16, 32, 64), 3),
    "resnet44": partial(_residual_network, (16, 32, 64), 7),
    "resnet18": partial(_torchvision_network, "resnet18", "conv1"),
    "mobilenet_v2": partial(_torchvision_network, "mobilenet_v2", "features.0.0"),
    "mobilenet_v3_small": partial(_torchvision_network, "mobilenet_v3_small", "features.0.0"),
    "shufflenet_v2_x0_5": partial(_torchvision_network, "shufflenet_v2_x0_5", "conv1.0"),
    "squeezenet1_1": partial(_torchvision_network, "squeezenet1_1", "features.0"),
    "efficientnet_b0": partial(_torchvision_network, "efficientnet_b0", "features.0.0"),
    "ds_cnn": tiny_networks.ds_cnn,
    "mobilenet_v1_025": tiny_networks.mobilenet_v1_025,
    "autoencoder": tiny_networks.autoencoder,
    "inertial_cnn": tiny_networks.inertial_cnn,
}
