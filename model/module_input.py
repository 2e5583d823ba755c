"""What a `torch.nn.Module` is fed: images, or sequences, which a graph has as images of height 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def takes_sequences(module: torch.nn.Module) -> bool:
    """Whether its convolutions are one-dimensional, so that it takes (N, C, L)."""
    from torch import nn

    parts = list(module.modules())
    flat = any(isinstance(part, nn.Conv1d) for part in parts)
    return flat and not any(isinstance(part, nn.Conv2d) for part in parts)


def as_taken(module: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Images (N, C, H, W) as the module takes them; of height 1, they may be its sequences (N, C, L)."""
    return images.squeeze(2) if images.shape[2] == 1 and takes_sequences(module) else images
