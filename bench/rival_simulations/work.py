"""What a rival's clients train, as bench/simulation.py has written it: network, images, settings."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from network import Residual
from torch import nn

MOMENTUM, WEIGHT_DECAY = 0.9, 5e-4


@dataclass(frozen=True)
class Work:
    folder: str
    model: str
    classes: int
    clients: int
    rounds: int
    workers: int
    epochs: int
    batch: int
    learning_rate: float

    def data(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The images and labels of a client; all have as many."""
        images, labels = _data(self.folder)
        size = len(images) // self.clients
        mine = slice(client * size, (client + 1) * size)
        return images[mine], labels[mine]

    def network(self) -> nn.Module:
        """In the layout of memory that torch is fastest with."""
        channels = self.data(0)[0].shape[1]
        return Residual(self.model, channels, self.classes).to(memory_format=torch.channels_last)

    def stamp(self) -> None:
        """A round is over."""
        with (Path(self.folder) / "stamps").open("a", encoding="ascii") as file:
            file.write(f"{time.monotonic()}\n")


def given() -> Work:
    """Named by the command's only word."""
    return Work(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


@cache
def kept_network(work: Work) -> nn.Module:
    """One for all clients that a process trains."""
    torch.set_num_threads(1)
    return work.network()


@cache
def _data(folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.from_numpy(np.load(Path(folder) / "images.npy"))
    labels = torch.from_numpy(np.load(Path(folder) / "labels.npy"))
    return images.to(memory_format=torch.channels_last), labels


def optimizer(parameters: Any, learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, learning_rate, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY)


def train(network: nn.Module, work: Work, client: int) -> None:
    """The client's epochs, in batches of a new order each time."""
    images, labels = work.data(client)
    loss, steps = nn.CrossEntropyLoss(), optimizer(network.parameters(), work.learning_rate)
    network.train()
    for _ in range(work.epochs):
        order = torch.randperm(len(images))
        # The last batch is left out if it is not full, as FedMPQ does.
        for start in range(0, len(images) - work.batch + 1, work.batch):
            chosen = order[start : start + work.batch]
            steps.zero_grad()
            loss(network(images[chosen]), labels[chosen]).backward()
            steps.step()
