"""Where the weights of a round lie among the codes that boards were sent, in whole numbers.

All boards with the same bit-width of a layer were sent the same codes with the same step, so what each gives
back is a whole number of units of that step, and a sum over boards is one of whole numbers. `Origin` is what
they have in common. It has two forms.

Carried changes come as `j (c - zero_point)` 256ths of a step (see `exchange.change`). The unit is
`step / 2^12`; a move is `d = 8 j (2c - 2 zero_point)` of them, and the weight `W` lies at

    place = rint(2^12 (W / step + zero_point)),  within the cell of the code that was sent,

code `c` being at `2^12 c`. The change is `kept - place`, with `kept = place + d` bounded by half a step
either side of the code that the client ended with (the kernel, `fedmpq/kernels.h`, states it). Where the
bound does not act, that is `d`, whatever the place is. Where it acts, the place is off by half a unit at
most, a 16th of what a change on the finest grid, of 256ths of a step, is off by. Finer units would say
nothing more, and every bit of them halves the number of boards that an int64 can hold.

A weight may lie far beyond the last code; its place counts up to 256 steps from there. The grid of an honest
change spans at most `2^bits` steps either way, so a larger `j` counts as the largest that does not span more.

Returned codes, of update rules that return models, are `d = 2c - 2 zero_point` half steps at the bit-width
that came back, less the same of the code that was sent: the step does not change when planes are pruned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.change import FRACTIONS
from fedmpq.kernels.changes import CHANGE_BITS, Changes, places
from fedmpq.method.aggregate import MergeError
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.quantized import PackedLayer, QuantizedLayer

MAX_CHANGE = 1 << (CHANGE_BITS + MAX_BITS + 1)
"""No change is so many units or more: the end of the codes and a place 256 steps beyond the other end."""
_CELL = 1 << CHANGE_BITS
# Half of a 256th of a step in units: of a code's distance from the zero point, twice is a whole number.
_UNITS = _CELL // FRACTIONS // 2


@dataclass(frozen=True)
class Origin:
    """One layer as boards with one bit-width were sent it."""

    layer: str
    sent: QuantizedLayer
    weights: NDArray[np.float32] | None
    """What `sent` was made of, where boards return changes; None: they return codes."""

    @classmethod
    def of_carried(cls, name: str, weights: NDArray[np.float32], sent: QuantizedLayer) -> Origin:
        """For changes of weights that were quantized to `sent`."""
        return cls(name, sent, weights)

    @classmethod
    def of_codes(cls, name: str, sent: QuantizedLayer) -> Origin:
        """For codes that come back."""
        return cls(name, sent, None)

    @property
    def bits(self) -> int:
        return self.sent.bits

    @property
    def step(self) -> NDArray[np.float32]:
        return self.sent.step

    @property
    def size(self) -> int:
        """Weights of the layer."""
        return self.sent.codes.size

    @property
    def carried(self) -> bool:
        return self.weights is not None

    @cached_property
    def places(self) -> NDArray[np.int32]:
        """Where the weights lie, or what is taken from returned codes; made when it is first needed."""
        if self.weights is not None:
            return places(self.weights, self.sent.codes, self.step, self.bits)
        twice = self.sent.integer_weights().astype(np.int32).reshape(-1)
        return twice * 2 if self.bits == MAX_BITS else twice

    @property
    def unit(self) -> NDArray[np.float64]:
        """What one whole number stands for, of each row of the layer; powers of two divide exactly."""
        return self.step.reshape(-1, 1).astype(np.float64) / (_CELL if self.carried else 2)

    def check(self, layer: PackedLayer) -> None:
        """Refuse a returned layer that does not count in this origin's units."""
        if layer.step.shape != self.step.shape:
            raise MergeError(
                f"layer {self.layer!r} came back with {layer.step.size} steps; it was sent {self.step.size}"
            )
        if layer.planes.shape[1] != (self.size + 7) // 8:
            raise MergeError(
                f"layer {self.layer!r} came back with planes of {layer.planes.shape[1]} bytes; "
                f"{self.size} weights take {(self.size + 7) // 8}"
            )
        if (used := self.size % 8) and (layer.planes[:, -1] >> used).any():
            raise MergeError(f"layer {self.layer!r} came back with padding bits set; they must be 0")
        if not self.carried:
            if layer.bits > self.bits or layer.step.tobytes() != self.step.tobytes():
                raise MergeError(f"layer {self.layer!r} came back with more bits or other steps than sent")
        elif layer.bits != self.bits:
            raise MergeError(
                f"layer {self.layer!r} came back with {layer.bits} bits; it was dealt {self.bits}"
            )
        elif not _are_whole(layer.step):
            raise MergeError(
                f"the change of layer {self.layer!r} has a step that is no whole number from 1 up"
            )

    def changes(self, returned: Sequence[PackedLayer]) -> Changes:
        """What boards have changed, all having returned as many bits; layers are checked before."""
        planes = np.stack([layer.planes for layer in returned])
        rows = max(1, self.step.size)
        if self.carried:
            claimed = np.stack([layer.step.reshape(-1) for layer in returned])
            steps = np.minimum(claimed, greatest_step(self.bits)).astype(np.int32) * np.int32(_UNITS)
        else:
            steps = np.ones((len(returned), rows), np.int32)
        return Changes(planes, steps, self.places, self.carried)


def _are_whole(steps: NDArray[np.float32]) -> bool:
    """Whether each is a whole number from 1 up; most layers have a single step."""
    if steps.size == 1:
        step = float(steps.reshape(-1)[0])
        return step >= 1 and step.is_integer()
    return bool(((steps == np.rint(steps)) & (steps >= 1)).all())


def greatest_step(bits: int) -> int:
    """The greatest `j` with which the grid of a change spans no more than `2^bits` steps either way."""
    reach = 2 ** (MAX_BITS - 1) - 1 if bits == MAX_BITS else (2**bits - 1) / 2
    return int(FRACTIONS * 2**bits / reach)
