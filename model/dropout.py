"""Dropout of what a layer reads: in training alone, drawn by counter.

A number in [0, 1) belongs to each element of each image, or to each channel of each image: where it is below
the rate the element is 0, everywhere else it is multiplied by `1 / (1 - rate)`. As codes have one scale for
a whole tensor, that factor goes into the scale, and codes that are kept stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.model.op_checks import GraphError, check_float32
from fedmpq.model.randomness import Draws, Purpose


@dataclass(frozen=True)
class Dropout:
    """The share of elements that are dropped, or of channels, if these go as a whole."""

    rate: float
    whole_channels: bool = False

    def check(self) -> None:
        """Refuse what is no rate."""
        check_float32("the rate of the dropout", self.rate, zero_allowed=False)
        if not self.rate < 1:
            raise GraphError(f"the rate of the dropout is {self.rate!r}, must be below 1")

    @property
    def factor(self) -> np.float32:
        """What is kept is multiplied by this."""
        return np.float32(1) / (np.float32(1) - np.float32(self.rate))

    def behind(self, earlier: Dropout) -> Dropout:
        """Both, one after the other, where they drop the same things."""
        rate = float(np.float32(1 - (1 - self.rate) * (1 - earlier.rate)))
        return Dropout(rate, self.whole_channels)


def kept(dropout: Dropout, draws: Draws, layer: int, step: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which elements of a batch `(images, ..., channels)` are kept.

    The numbers of image `i`, `count` of them, are those of blocks `i * ceil(count / 4)` and on, four each.
    """
    images, channels = shape[0], shape[-1]
    count = channels if dropout.whole_channels else int(np.prod(shape[1:]))
    whole = -(-count // 4) * 4
    numbers = draws.uniform(images * whole, Purpose.DROPOUT, layer=layer, step=step).reshape(images, whole)
    stays = numbers[:, :count] >= np.float32(dropout.rate)
    inner = (1,) * (len(shape) - 2) if dropout.whole_channels else shape[1:-1]
    return np.broadcast_to(stays.reshape(images, *inner, channels), shape)
