"""Small networks for tasks beside classification, named as `tests.lab.networks:NAME`."""

from __future__ import annotations

from torch import nn


def autoencoder(classes: int, channels: int) -> nn.Module:
    """As many outputs as inputs, through 6 numbers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(classes, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, classes),
    )


def dense(classes: int, channels: int) -> nn.Module:
    """Of samples of so many features."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(channels, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, classes)
    )
