"""A merge by the plain mean, to which updates are added one at a time, as they arrive."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import Update
from fedmpq.method.aggregate import MergeError, WeightedSum, merge_deltas, merge_models, moved_by
from fedmpq.method.integer_sum import IntegerSum, whole_weights
from fedmpq.method.merging import HELD_BYTES, Answers, MergingRound
from fedmpq.method.origins import Origin
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.quantized import PackedLayer, Side, Weights


class WholeLayers:
    """The layers of a round as sums of whole numbers.

    What came back waits, packed, until it is `HELD_BYTES` or the round ends: a round of which all is waiting
    is summed one layer after the other, in little memory.
    """

    def __init__(self, merging: MergingRound, largest: float | None = None) -> None:
        """No weight exceeds `largest`, by default that of the round's own fleet."""
        self._merging = merging
        self._largest = merging.largest_weight if largest is None else largest
        sizes = {node.name: math.prod(merging.graph.weight_shape(node.name)) for node in merging.graph.layers}
        self._sums = {name: IntegerSum(size, waiting=sys.maxsize) for name, size in sizes.items()}
        self._origins: dict[str, dict[int, Origin]] = {name: {} for name in sizes}
        self._weight = 0
        self._waiting_bytes = 0

    def add(self, sender: ClientRecord, layers: Mapping[str, PackedLayer], weight: float) -> None:
        (whole,) = whole_weights([weight], self._largest)
        assert sender.dealt is not None
        origins = [self._origin(name, bits) for name, bits in zip(self._sums, sender.dealt, strict=True)]
        for origin in origins:
            origin.check(layers[origin.layer])
        for origin in origins:
            self._sums[origin.layer].add(origin, layers[origin.layer], whole)
        self._weight += whole
        self._waiting_bytes += sum(layer.nbytes for layer in layers.values())
        if self._waiting_bytes > HELD_BYTES:
            self._settle()

    def _origin(self, name: str, bits: int) -> Origin:
        known = self._origins[name]
        if bits not in known:
            known[bits] = self._merging.origin(name, bits)
        return known[bits]

    def _settle(self) -> None:
        for total in self._sums.values():
            total.settle()
        self._waiting_bytes = 0

    def merge(self, other: WholeLayers) -> None:
        self._merge(other._sums, other._weight)

    def merge_bytes(self, sums: Mapping[str, bytes], weight: int) -> None:
        """Add what `to_bytes` gave elsewhere, of weights that add up to this."""
        self._merge({name: IntegerSum.from_bytes(data) for name, data in sums.items()}, weight)

    def _merge(self, sums: Mapping[str, IntegerSum], weight: int) -> None:
        for name, total in self._sums.items():
            total.merge(sums[name])
        self._weight += weight

    def to_bytes(self) -> dict[str, bytes]:
        """The sum of each layer."""
        return {name: total.to_bytes() for name, total in self._sums.items()}

    @property
    def weight(self) -> int:
        """The sum of the weights added."""
        return self._weight

    def taken(self, name: str) -> NDArray[np.float64]:
        """`sum_n weight_n change_n` of a layer, which is dropped."""
        total = self._sums.pop(name)
        value = total.value({bits: self._origin(name, bits) for bits in total.widths})
        del self._origins[name]
        return value

    def merged(self) -> Weights:
        """The layers of the next model; each sum is dropped when it has been used."""
        new: Weights = {}
        for name in tuple(self._sums):
            new |= moved_by(self._merging.model.weights, {name: self.taken(name)}, self._weight)
        return new


class _FloatLayers:
    """The layers of a round as sums of floating-point numbers, which must come in the order of clients."""

    def __init__(self, merging: MergingRound) -> None:
        self._merging = merging
        self._sum = WeightedSum()
        self._last = -1

    def add(self, sender: ClientRecord, layers: Mapping[str, PackedLayer], weight: float) -> None:
        if sender.client < self._last:
            raise MergeError(
                f"the update of client {sender.client} comes after {self._last}'s; merge in order"
            )
        self._sum.add(weight, self._merging.change(sender, layers))
        self._last = sender.client

    def merged(self) -> Weights:
        if self._merging.averages_models:
            return merge_models(self._sum)
        return merge_deltas(self._merging.model.weights, self._sum)


@dataclass(frozen=True)
class PartialMerge:
    """What a merge in whole numbers has gathered of some of a round's clients, for one elsewhere to take."""

    senders: tuple[ClientRecord, ...]
    """In the order of clients."""
    sides: tuple[Side, ...]
    """What they returned beside their layers: floats, which are summed when all are there."""
    layers: Mapping[str, bytes]
    weight: int


class RunningMerge:
    """The plain mean of a round's updates, each added as it arrives and forgotten, but for its side tensors.

    Memory is `HELD_BYTES` of packed layers; beyond that 12 bytes a weight for each bit-width that boards were
    sent. Updates of `deltas` may come in any order, and merges of distinct clients may be merged; averages of
    whole models take clients in order, in one merge.
    """

    def __init__(self, merging: MergingRound) -> None:
        if merging.recipe.aggregation != "mean":
            raise MergeError(
                f"aggregation = {merging.recipe.aggregation!r} compares the updates of a round with one "
                'another; merge them together, or use aggregation = "mean"'
            )
        self._merging = merging
        self._answers = Answers(merging)
        self._finished = False
        self._layers: WholeLayers | _FloatLayers = (
            WholeLayers(merging) if merging.in_integers else _FloatLayers(merging)
        )

    def add(self, update: Update) -> None:
        """Add one update; one that does not belong here is a MergeError and changes nothing."""
        self._check_open()
        sender = self._answers.sender(update)
        self._layers.add(sender, update.layers, float(self._merging.weights([sender])[0]))
        self._answers.take(sender, update)

    def merge(self, other: RunningMerge) -> None:
        """Add what another merge of the same round has gathered of other clients."""
        self._check_open()
        other._check_open()
        self._answers.check_apart(other._answers.senders)
        self._whole.merge(other._whole)
        self._answers.take_all(other._answers.senders, other._answers.sides)

    def partial(self) -> PartialMerge:
        """What has been gathered so far, to be taken by another merge of the same round."""
        self._check_open()
        senders, sides = self._answers.senders, self._answers.sides
        return PartialMerge(tuple(senders), tuple(sides), self._whole.to_bytes(), self._whole.weight)

    def take(self, partial: PartialMerge) -> None:
        """Add what another merge has gathered, perhaps in another process; the same as `merge`."""
        self._check_open()
        self._answers.check_apart(partial.senders)
        self._whole.merge_bytes(partial.layers, partial.weight)
        self._answers.take_all(partial.senders, partial.sides)

    @property
    def _whole(self) -> WholeLayers:
        if not isinstance(self._layers, WholeLayers):
            raise MergeError(
                "whole models are averaged in the order of clients; add their updates to one merge"
            )
        return self._layers

    def finish(self) -> GlobalModel:
        """The next global model. The merge is used up."""
        self._check_open()
        self._answers.check_samples()
        self._finished = True
        return self._answers.next_model(self._merging.weights(self._answers.senders), self._layers.merged())

    def _check_open(self) -> None:
        if self._finished:
            raise MergeError("this merge is finished; begin another")
