"""The merge of a round's updates into the next global model.

Where what boards return is merged as a change of what they were sent (`merge = "deltas"`), the rules that
weigh whole clients ("mean", "agreement", "krum", "multi_krum") sum whole numbers (`integer_sum`): exact in
any order and grouping. The paper's average of whole models (`merge = "models"`), and the rules that go weight
by weight ("trimmed_mean", "median"), are sums and means of floating-point numbers in the order of clients, as
is the mean of side tensors under every rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.change import change_within_cells
from fedmpq.exchange.messages import Update, bit_widths, unpack_layers
from fedmpq.method.aggregate import (
    MergeError,
    average_bit_widths,
    merge_deltas,
    moved_by,
    next_average,
)
from fedmpq.method.integer_products import scalar_products
from fedmpq.method.integer_sum import IntegerSum, whole_weights
from fedmpq.method.origins import Origin
from fedmpq.method.recipe import Recipe
from fedmpq.method.robust import (
    Changes,
    Votes,
    limited_weights,
    merged_sides,
    middle_changes,
    votes,
)
from fedmpq.method.round_quantizer import RoundQuantizer
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import PackedLayer, Side, Weights, dequantize_all

HELD_BYTES = 1 << 28
"""Of returned layers that a merge holds, packed. Of more than that it reads updates again, some layers at a
time."""
_MIDDLES = ("trimmed_mean", "median")


@dataclass(frozen=True)
class MergingRound:
    """What a merge goes by."""

    graph: Graph
    recipe: Recipe
    model: GlobalModel
    quantizer: RoundQuantizer
    dealt: Callable[[ClientRecord], tuple[int, ...]]
    """The bit-widths that a client was sent."""
    share: Callable[[ClientRecord], float]
    """What each of a client's samples counts."""

    @property
    def averages_models(self) -> bool:
        """Whether whole models are averaged, as in the paper; other rules go by what clients have changed."""
        return self.recipe.merge == "models" and self.recipe.aggregation == "mean"

    @property
    def in_integers(self) -> bool:
        """Whether the layers are merged in whole numbers."""
        return self.recipe.merge == "deltas" and self.recipe.aggregation not in _MIDDLES

    def weights(self, senders: Sequence[ClientRecord]) -> NDArray[np.float64]:
        """What each sender counts: its data, and its bits where they count, within what is plausible."""
        own = [self.share(sender) * sender.samples for sender in senders]
        return limited_weights(own, [self._usual], self.recipe.share_limit)

    @cached_property
    def largest_weight(self) -> float:
        """What no sender's weight exceeds, whoever has answered."""
        return float(limited_weights(self._fleet, [self._usual], self.recipe.share_limit).max(initial=0))

    @cached_property
    def _fleet(self) -> list[float]:
        return [self.share(client) * client.samples for client in self.model.clients]

    @cached_property
    def _usual(self) -> float:
        # Once a round: updates are added one at a time, and a fleet may be large.
        return float(np.median(self._fleet))

    def origin(self, name: str, bits: int) -> Origin:
        """The layer as boards with that bit-width were sent it."""
        sent = self.quantizer.layer(name, bits)
        if self.recipe.plan.update == "carried":
            return Origin.of_carried(name, self.model.weights[name], sent)
        return Origin.of_codes(name, sent)

    def change(self, sender: ClientRecord, layers: Mapping[str, PackedLayer]) -> Weights:
        """What the sender adds to these layers, in floating point."""
        returned = unpack_layers(self.graph, layers)
        if self.averages_models:
            return dequantize_all(returned)
        weights = self.model.weights
        if self.recipe.merge == "models":
            return {name: layer.weights() - weights[name] for name, layer in returned.items()}
        assert sender.dealt is not None
        sent = self.quantizer.layers(sender.dealt)
        if self.recipe.plan.update == "carried":
            return {
                name: change_within_cells(weights[name], sent[name], change)
                for name, change in returned.items()
            }
        return {name: layer.weights() - sent[name].weights() for name, layer in returned.items()}


class Answers:
    """Whose updates a round has, and all of them but the layers."""

    def __init__(self, merging: MergingRound) -> None:
        self._merging = merging
        self._records = {client.client: client for client in merging.model.clients}
        self._senders: dict[int, ClientRecord] = {}
        self._sides: dict[int, Side] = {}

    def sender(self, update: Update) -> ClientRecord:
        """The sender of an update that belongs here, with what it was dealt, returned and counts for."""
        number = self._merging.model.round + 1
        if update.client not in self._records:
            raise MergeError(f"the update of client {update.client}: this run does not have that client")
        if update.round != number:
            raise MergeError(f"the update of client {update.client} is of round {update.round}, not {number}")
        if update.client in self._senders:
            raise MergeError(f"client {update.client} sent two updates; a round takes one from each")
        record = self._records[update.client]
        # What the server knew when it chose the client; a larger claim since then does not count.
        return replace(
            record,
            samples=min(update.samples, record.samples),
            dealt=self._merging.dealt(record),
            returned=bit_widths(self._merging.graph, update.layers),
        )

    def take(self, sender: ClientRecord, update: Update) -> None:
        """Count the update among the round's."""
        self._senders[sender.client] = sender
        self._sides[sender.client] = update.side

    def check_apart(self, others: Collection[ClientRecord]) -> None:
        """Refuse clients that have answered here."""
        for client in sorted(self._senders.keys() & {other.client for other in others}):
            raise MergeError(f"client {client} sent two updates; a round takes one from each")

    def take_all(self, senders: Sequence[ClientRecord], sides: Sequence[Side]) -> None:
        """Count what was taken elsewhere, of other clients."""
        for sender, side in zip(senders, sides, strict=True):
            self._senders[sender.client] = sender
            self._sides[sender.client] = side

    @property
    def senders(self) -> list[ClientRecord]:
        """In the order of clients."""
        return [self._senders[client] for client in sorted(self._senders)]

    @property
    def sides(self) -> list[Side]:
        """What they returned beside their layers, in the same order."""
        return [self._sides[client] for client in sorted(self._sides)]

    def check_samples(self) -> None:
        """Refuse a round in which nobody has trained on anything."""
        if not any(self._merging.share(one) * one.samples > 0 for one in self._senders.values()):
            raise MergeError("no client has any samples; a round needs at least one update trained on data")

    def next_model(self, weights: NDArray[np.float64], new: Weights) -> GlobalModel:
        """The model with these layers; clients, in order, count by `weights` in all else."""
        merging, model = self._merging, self._merging.model
        new_side = merged_sides(weights, self.sides, robust=merging.recipe.aggregation != "mean")
        # Nobody has trained these; an average of their quantized forms would move them all the same.
        new |= {name: model.weights[name] for name in merging.graph.frozen_layers}
        new_side |= {name: model.side[name] for name in merging.graph.frozen_side}
        seen = {one.client: replace(one, samples=self._records[one.client].samples) for one in self.senders}
        return GlobalModel(
            model.round + 1,
            new,
            new_side,
            average_bit_widths(weights / math.fsum(weights), [one.returned or () for one in self.senders]),
            tuple(seen.get(client.client, client) for client in model.clients),
            next_average(model, new, new_side, merging.recipe.averaging),
        )


class Returned:
    """The layers that clients gave back, in their order: held while they are few, else read again."""

    def __init__(self, updates: Iterable[Update]) -> None:
        self._updates = updates
        self._held: list[Mapping[str, PackedLayer]] | None = []
        self._bytes: dict[str, int] = {}

    def take(self, layers: Mapping[str, PackedLayer]) -> None:
        """The layers of the next client, on the first way through the updates."""
        for name, layer in layers.items():
            self._bytes[name] = self._bytes.get(name, 0) + layer.nbytes
        if self._held is not None:
            self._held.append(layers)
            if sum(self._bytes.values()) > HELD_BYTES:
                self._held = None

    def clients(self) -> Iterator[Mapping[str, PackedLayer]]:
        """Client after client."""
        if self._held is None:
            yield from (update.layers for update in self._updates)
        else:
            yield from self._held

    def layers(self) -> Iterator[tuple[str, list[PackedLayer]]]:
        """Layer after layer: its name and what all clients returned of it."""
        for names in self._groups():
            found: dict[str, list[PackedLayer]] = {name: [] for name in names}
            for layers in self.clients():
                for name in names:
                    found[name].append(layers[name])
            while found:
                name = next(iter(found))
                yield name, found.pop(name)

    def _groups(self) -> Iterator[list[str]]:
        group: list[str] = []
        held = 0
        for name, needed in self._bytes.items():
            if group and self._held is None and held + needed > HELD_BYTES:
                yield group
                group, held = [], 0
            group.append(name)
            held += needed
        yield group


@dataclass(frozen=True)
class WholeChanges:
    """What the clients of a round have changed, in whole numbers, one layer after the other."""

    merging: MergingRound
    senders: Sequence[ClientRecord]
    returned: Returned

    def layers(self) -> Iterator[tuple[str, list[Origin], list[PackedLayer]]]:
        """Each layer's name, and for every client what it was sent and what it returned."""
        places = {node.name: place for place, node in enumerate(self.merging.graph.layers)}
        for name, layers in self.returned.layers():
            widths = [one.dealt[places[name]] for one in self.senders if one.dealt is not None]
            known = {bits: self.merging.origin(name, bits) for bits in sorted(set(widths))}
            yield name, [known[bits] for bits in widths], layers

    def products(self) -> Iterator[tuple[str, NDArray[np.float64]]]:
        """Layer by layer, the scalar products of all clients' changes."""
        for name, origins, layers in self.layers():
            yield name, scalar_products(origins, layers)

    def merged(self, counted: Votes) -> Weights:
        """The weights moved by the changes, which count as the votes say."""
        largest = self.merging.largest_weight
        all_weights = sum(whole_weights(counted.weights, largest))
        new: Weights = {}
        for name, origins, layers in self.layers():
            factors = np.ones(len(layers)) if counted.factors is None else counted.factors[name]
            whole = whole_weights(counted.weights * factors, largest)
            total = IntegerSum(origins[0].size)
            for origin, layer, weight in zip(origins, layers, whole, strict=True):
                total.add(origin, layer, weight)
            sums = {name: total.value({origin.bits: origin for origin in origins})}
            new |= moved_by(self.merging.model.weights, sums, all_weights)
        return new


def merge_by_rule(merging: MergingRound, updates: Iterable[Update]) -> GlobalModel:
    """The next global model by a rule that needs all updates, which come in the order of clients.

    Each is read once, and its layers are held packed, unless they are more than `HELD_BYTES` in all.
    """
    again = list(updates) if iter(updates) is updates else updates
    answers, returned = Answers(merging), Returned(again)
    for update in in_order(again):
        answers.take(answers.sender(update), update)
        returned.take(update.layers)
    answers.check_samples()
    senders = answers.senders
    changes = changes_of(merging, senders, returned)
    counted = votes(merging.recipe.aggregation, merging.weights(senders), changes)
    if isinstance(changes, WholeChanges):
        return answers.next_model(counted.weights, changes.merged(counted))
    moved = middle_changes(merging.recipe.aggregation, changes) or counted.merged(changes)
    return answers.next_model(counted.weights, merge_deltas(merging.model.weights, moved))


def changes_of(
    merging: MergingRound, senders: Sequence[ClientRecord], returned: Returned
) -> WholeChanges | Changes:
    """What the clients have changed, in whole numbers where the recipe merges those, else in floats."""
    if merging.in_integers:
        return WholeChanges(merging, senders, returned)

    def read(names: Sequence[str]) -> Iterator[Weights]:
        for sender, layers in zip(senders, returned.clients(), strict=True):
            yield merging.change(sender, {name: layers[name] for name in names})

    shapes = {node.name: merging.graph.weight_shape(node.name) for node in merging.graph.layers}
    return Changes(shapes, len(senders), read)


def in_order(updates: Iterable[Update]) -> Iterator[Update]:
    """The updates, as long as their clients ascend."""
    last = -1
    for update in updates:
        if update.client < last:
            raise MergeError(f"the update of client {update.client} comes after {last}'s; merge in order")
        last = update.client
        yield update
