"""Small networks for sensors: those of MLPerf Tiny, and a one-dimensional one for inertial sensors.

MLPerf Tiny's (Banbury et al., 2021) have the layers of its reference models, but for two things: what stands
before a BatchNorm has no bias, which BatchNorm would take away again, and there is no dropout. Its fourth
network is `resnet8` of the zoo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_AUTOENCODER_WIDTHS = (128, 128, 128, 128, 8, 128, 128, 128, 128)
# Output channels of MobileNetV1's blocks at a quarter of its width, and their strides.
_MOBILENET_BLOCKS = (
    (16, 1), (32, 2), (32, 1), (64, 2), (64, 1), (128, 2),
    (128, 1), (128, 1), (128, 1), (128, 1), (128, 1), (256, 2), (256, 1),
)  # fmt: skip


def ds_cnn(*, classes: int, channels: int) -> torch.nn.Module:
    """Keyword spotting: 49 frames of 10 features; a 10x4 convolution, four separable ones, mean, linear.

    The first convolution pads 5 rows above and below, where the reference pads 4 above and 5 below.
    """
    from torch import nn

    first = [*_layer(nn.Conv2d(channels, 64, (10, 4), 2, (5, 1), bias=False))]
    separable = [part for _ in range(4) for part in _separable(64, 64, 1)]
    return nn.Sequential(*first, *separable, *_head(64, classes))


def mobilenet_v1_025(*, classes: int, channels: int) -> torch.nn.Module:
    """Visual wake words: images of 96x96; MobileNetV1 (Howard et al., 2017), a quarter of its channels."""
    from torch import nn

    parts, width = [*_layer(nn.Conv2d(channels, 8, 3, 2, 1, bias=False))], 8
    for outputs, stride in _MOBILENET_BLOCKS:
        parts += _separable(width, outputs, stride)
        width = outputs
    return nn.Sequential(*parts, *_head(width, classes))


def autoencoder(*, classes: int, channels: int) -> torch.nn.Module:
    """Anomaly detection: 640 values, or as many as the data have, through a bottleneck of 8 and back.

    In the task `reconstruction` `classes` is the number of values; `channels` says nothing about it.
    """
    from torch import nn

    parts: list[nn.Module] = [nn.Flatten()]
    width = classes
    for outputs in _AUTOENCODER_WIDTHS:
        parts += [nn.Linear(width, outputs, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
        width = outputs
    return nn.Sequential(*parts, nn.Linear(width, classes))


def inertial_cnn(*, classes: int, channels: int) -> torch.nn.Module:
    """Activities from windows of 128 steps of accelerometer and gyroscope: three convolutions in time."""
    from torch import nn

    parts: list[nn.Module] = []
    width = channels
    for outputs, kernel in ((32, 5), (64, 5), (128, 3)):
        parts += [
            nn.Conv1d(width, outputs, kernel, padding=kernel // 2, bias=False),
            nn.BatchNorm1d(outputs),
            nn.ReLU(),
            nn.MaxPool1d(2),
        ]
        width = outputs
    return nn.Sequential(*parts, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, classes))


def _layer(convolution: torch.nn.Conv2d) -> list[torch.nn.Module]:
    """A convolution as He et al. (2015) begin it, with BatchNorm and ReLU."""
    from torch import nn

    # By inputs: counted by outputs, torch takes a depthwise convolution for one of all channels.
    nn.init.kaiming_normal_(convolution.weight, mode="fan_in", nonlinearity="relu")
    return [convolution, nn.BatchNorm2d(convolution.out_channels), nn.ReLU()]


def _separable(inputs: int, outputs: int, stride: int) -> list[torch.nn.Module]:
    """A 3x3 convolution of each channel, then one of 1x1 across channels."""
    from torch import nn

    depthwise = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
    return [*_layer(depthwise), *_layer(nn.Conv2d(inputs, outputs, 1, bias=False))]


def _head(width: int, classes: int) -> list[torch.nn.Module]:
    """The mean over the image and a linear layer."""
    from torch import nn

    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
