"""Every random number of a run, drawn by counter: one key gives one number on every engine and machine.

Philox4x32-10 keyed by (seed, client) and counted by (block, step, round, layer and purpose). Nothing is
stateful, so a run resumed, repeated, or spread over other processes draws the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fedmpq import kernels

SERVER = 0xFFFFFFFF
"""The client number of draws that belong to no client."""


class Purpose(IntEnum):
    """What a draw is for, so that two uses in one step never share numbers."""

    UPDATE = 0
    LASSO = 1
    ORDER = 2
    AUGMENT = 3
    SELECT = 4
    UPLOAD = 5
    ERROR = 6
    CALIBRATE = 7
    DROPOUT = 8
    SPEED = 9


@dataclass(frozen=True)
class Draws:
    """The random numbers of one client in one round."""

    seed: int
    client: int
    round: int

    def uniform(self, count: int, purpose: Purpose, *, layer: int = 0, step: int = 0) -> NDArray[np.float32]:
        """`count` numbers in [0, 1)."""
        return kernels.philox_uniform(count, self.seed, self.client, self.round, layer, step, int(purpose))
