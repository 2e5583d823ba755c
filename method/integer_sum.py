"""Sums of what boards have changed, in whole numbers: exact, so the same in any order and any grouping.

The weights of boards are whole numbers too (`whole_weights`). An `IntegerSum` holds, for one layer, the int64
sum over boards of weight times change for each bit-width that boards were sent, as the units of two
bit-widths differ. Sums of parts of the boards are merged in any tree. Steps are folded in once at the end.

How much an int64 holds: a change is below `MAX_CHANGE = 2^21` units, so sums stay below 2^63 as long as
weights are at most `2^42` in all. The greatest weight being `2^22`, that is `MAX_BOARDS = 2^20` boards of the
greatest weight, about a million in one round, or more of lesser weight. An `add` or `merge` beyond that is
refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from fedmpq.method.aggregate import MergeError
from fedmpq.method.origins import MAX_CHANGE, Origin
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.quantized import PackedLayer

MAX_WEIGHT = 1 << 22
"""The greatest weight of a board."""
MAX_TOTAL = (1 << 63) // MAX_CHANGE
"""The greatest sum of weights with which no sum of changes can leave an int64."""
MAX_BOARDS = MAX_TOTAL // MAX_WEIGHT
"""So many boards of the greatest weight can be summed."""
TOGETHER = 8
"""Returned layers that are added in one pass over the sums."""
_MAGIC = b"fedmpq integer sum 1\n"
_HEADER_BYTES = 8
_CACHED = 1 << 14


def whole_weights(weights: Iterable[float], largest: float) -> list[int]:
    """Weights of `0..largest` as whole numbers of `0..MAX_WEIGHT`: `rint(2^e w)`, but at least 1 unless `w`
    is 0.

    `e` is the greatest whole number with `2^e largest < MAX_WEIGHT`. A power of two scales exactly: counts of
    samples below `MAX_WEIGHT` keep their ratios to the bit.
    """
    if not (math.isfinite(largest) and largest > 0):
        raise MergeError(f"the largest weight of a round is {largest}; it must be positive and finite")
    exponent = MAX_WEIGHT.bit_length() - 1 - math.frexp(largest)[1]
    found = []
    for weight in weights:
        if not 0 <= weight <= largest:
            raise MergeError(f"the weight of an update is {weight}; it must be within 0..{largest}")
        found.append(max(round(math.ldexp(weight, exponent)), int(weight > 0)))
    return found


class IntegerSum:
    """The sum over boards of weight times change, of one layer of `size` weights."""

    def __init__(self, size: int, waiting: int = TOGETHER) -> None:
        """So many returned layers of a kind may wait before they are added, whatever they hold in memory."""
        self._size = size
        self._most_waiting = waiting
        self._sums: dict[int, NDArray[np.int64]] = {}
        self._weight = 0
        self._waiting: dict[tuple[int, int], list[tuple[PackedLayer, int]]] = {}
        self._origins: dict[int, Origin] = {}

    @property
    def weight(self) -> int:
        """The sum of the weights added."""
        return self._weight

    def add(self, origin: Origin, layer: PackedLayer, weight: int) -> None:
        """Add what a board, which was sent the layer as `origin` says, gave back.

        An `add` that raises leaves the sum as it was.
        """
        if not 0 <= weight <= MAX_WEIGHT:
            raise MergeError(f"the weight of an update is {weight}; it must be within 0..{MAX_WEIGHT}")
        if origin.size != self._size:
            raise MergeError(f"layer {origin.layer!r} has {origin.size} weights, this sum {self._size}")
        origin.check(layer)
        self._take(weight)
        if weight:
            self._origins[origin.bits] = origin
            waiting = self._waiting.setdefault((origin.bits, layer.bits), [])
            waiting.append((layer, weight))
            if len(waiting) >= self._most_waiting:
                self._add_waiting(origin.bits, layer.bits)

    def merge(self, other: IntegerSum) -> None:
        """Add the sum over other boards."""
        if other._size != self._size:
            raise MergeError(f"a sum of {other._size} weights cannot be added to one of {self._size}")
        other.settle()
        self._take(other._weight)
        for bits, sums in other._sums.items():
            self._at(bits)[...] += sums

    def value(self, origins: Mapping[int, Origin]) -> NDArray[np.float64]:
        """`sum_n weight_n change_n` as real numbers: each bit-width's sum times its unit, least bits first.

        `origins` has one for each bit-width that was added.
        """
        self.settle()
        total = np.zeros(self._size)
        for bits in sorted(self._sums):
            unit = origins[bits].unit
            _fold(self._sums[bits].reshape(len(unit), -1), unit, total.reshape(len(unit), -1))
        return total

    @property
    def widths(self) -> list[int]:
        """The bit-widths that were added with any weight, the least first."""
        self.settle()
        return sorted(self._sums)

    def to_bytes(self) -> bytes:
        """A JSON header, its length before it, then the sums as little-endian int64, the least bits first.

        Equal sums have equal bytes.
        """
        self.settle()
        facts = {"size": self._size, "weight": self._weight, "bits": sorted(self._sums)}
        header = json.dumps(facts, sort_keys=True).encode()
        sums = [self._sums[bits].astype("<i8").tobytes() for bits in sorted(self._sums)]
        return b"".join((_MAGIC, len(header).to_bytes(_HEADER_BYTES, "little"), header, *sums))

    @classmethod
    def from_bytes(cls, data: bytes) -> IntegerSum:
        """The sum that `to_bytes` gave; anything else is a MergeError."""
        start = len(_MAGIC) + _HEADER_BYTES
        if not data.startswith(_MAGIC) or len(data) < start:
            raise MergeError(f"these {len(data)} bytes are no integer sum of this version")
        end = start + int.from_bytes(data[len(_MAGIC) : start], "little")
        size, weight, widths = _facts(data[start:end])
        if len(data) != end + 8 * size * len(widths):
            raise MergeError(
                f"an integer sum of {size} weights at {len(widths)} bit-widths has {len(data)} bytes, "
                f"not {end + 8 * size * len(widths)}"
            )
        found = cls(size)
        found._take(weight)
        for place, bits in enumerate(widths):
            sums = np.frombuffer(data, "<i8", size, end + 8 * size * place).astype(np.int64)
            if (sums >= MAX_CHANGE * weight).any() or (sums <= -MAX_CHANGE * weight).any():
                raise MergeError(f"an integer sum holds more than weights of {weight} in all can give")
            found._sums[bits] = sums
        return found

    def _take(self, weight: int) -> None:
        if self._weight + weight > MAX_TOTAL:
            raise MergeError(
                f"the weights of this round's updates add up to more than {MAX_TOTAL}, with which sums might "
                f"not fit 64 bits; merge at most {MAX_BOARDS} boards in a round"
            )
        self._weight += weight

    def _at(self, bits: int) -> NDArray[np.int64]:
        return self._sums.setdefault(bits, np.zeros(self._size, np.int64))

    def _add_waiting(self, bits: int, returned: int) -> None:
        waiting, sums = self._waiting.pop((bits, returned)), self._at(bits)
        for first in range(0, len(waiting), TOGETHER):
            layers, weights = zip(*waiting[first : first + TOGETHER], strict=True)
            self._origins[bits].changes(layers).add_to(sums, np.array(weights, np.int32))

    def settle(self) -> None:
        """Add what is waiting."""
        for key in tuple(self._waiting):
            self._add_waiting(*key)


def _fold(sums: NDArray[np.int64], unit: NDArray[np.float64], total: NDArray[np.float64]) -> None:
    """`total += sums * unit`, each row with its unit, as many at a time as stay in a cache."""
    rows, row = sums.shape
    together = max(1, _CACHED // row)
    for first in range(0, rows, together):
        some = slice(first, first + together)
        for start in range(0, row, _CACHED):
            part = slice(start, start + _CACHED)
            total[some, part] += sums[some, part] * unit[some]


def _facts(header: bytes) -> tuple[int, int, list[int]]:
    """Size, weight and bit-widths of a stored sum."""
    try:
        facts = json.loads(header)
        size, weight, widths = facts["size"], facts["weight"], facts["bits"]
    except (ValueError, KeyError, TypeError) as error:
        raise MergeError(f"an integer sum has a header that cannot be read: {error!r}") from None
    whole = all(type(number) is int for number in (size, weight)) and isinstance(widths, list)
    known = whole and widths == [bits for bits in range(1, MAX_BITS + 1) if bits in widths]
    if not known or size < 0 or weight < 0:
        raise MergeError(f"an integer sum has a header that cannot be: {header.decode(errors='replace')}")
    return size, weight, widths
