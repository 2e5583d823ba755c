"""The residual networks of fedmpq's zoo, for environments without fedmpq; tests hold them equal."""

from __future__ import annotations

import torch
from torch import nn

LAYOUTS = {"digits_cnn": ((16, 32), 1), "resnet20": ((16, 32, 64), 3)}
"""Channels of each stage, and blocks in it."""


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class Residual(nn.Module):
    def __init__(self, model: str, channels: int, classes: int) -> None:
        super().__init__()
        widths, blocks = LAYOUTS[model]
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.stages: list[str] = []
        before = widths[0]
        for number, width in enumerate(widths, 1):
            first = Block(before, width, 1 if number == 1 else 2)
            rest = [Block(width, width, 1) for _ in range(blocks - 1)]
            self.stages.append(f"layer{number}")
            self.add_module(self.stages[-1], nn.Sequential(first, *rest))
            before = width
        self.fc = nn.Linear(before, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        for stage in self.stages:
            x = self.get_submodule(stage)(x)
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits
