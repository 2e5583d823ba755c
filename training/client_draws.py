"""Whose random numbers a bound step draws: what is bound once serves one client after the other."""

from __future__ import annotations

from ctypes import c_uint32

from fedmpq.kernels.tensors import Counter
from fedmpq.model.randomness import Draws


class ClientDraws:
    """Seed, client and round of the draws, which calls read when they are made."""

    def __init__(self) -> None:
        self._seed, self._client, self._round = c_uint32(), c_uint32(), c_uint32()

    def turn_to(self, draws: Draws) -> None:
        """From now on the numbers are these."""
        self._seed.value, self._client.value, self._round.value = draws.seed, draws.client, draws.round

    def counter(self, layer: int) -> Counter:
        """The numbers of the layer of that index."""
        return Counter(self._seed, self._client, self._round, layer, 0)
