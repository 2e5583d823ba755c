"""A quantized method on the server: deal bit-widths, quantize what goes out, merge what comes back.

Pure functions of the global model, so that the server, a simulation, and a replay after a crash do the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.change import change_within_cells
from fedmpq.exchange.messages import (
    Assignment,
    Calibration,
    Update,
    bit_widths,
    rounded_side,
    unpack_layers,
)
from fedmpq.method.aggregate import (
    MergeError,
    average_bit_widths,
    merge_deltas,
    merge_models,
    next_average,
    participation_weights,
)
from fedmpq.method.pruning_growing import deal_best, deal_paper
from fedmpq.method.recipe import Recipe
from fedmpq.method.robust import (
    Changes,
    Votes,
    limited_weights,
    middle_changes,
    summed,
    votes,
    within_majority,
)
from fedmpq.method.state import ClientRecord, Deployment, GlobalModel
from fedmpq.model.batch_statistics import quantized_statistics, unquantized_statistics
from fedmpq.model.calibration import MergedStatistics, calibration_batches, measure, statistics_names
from fedmpq.model.graph import Graph
from fedmpq.model.grid import MAX_BITS, check_bits
from fedmpq.model.quantized import Layers, PackedLayer, QuantizedLayer, Side, Weights, dequantize_all
from fedmpq.model.randomness import SERVER, Draws, Purpose


class RoundQuantizer:
    """The global model of one round on its grids, each layer at each bit-width quantized once."""

    def __init__(self, graph: Graph, weights: Weights, side: Side, recipe: Recipe) -> None:
        self._graph = graph
        self._weights = weights
        self._side = side
        self._recipe = recipe
        self._cache: dict[tuple[str, int], QuantizedLayer] = {}
        self._packed: dict[tuple[str, int], PackedLayer] = {}
        self._sides: dict[tuple[int, ...], Side] = {}
        self._sent_sides: dict[tuple[int, ...], Side] = {}
        self._errors: NDArray[np.float64] | None = None

    def is_of(self, model: GlobalModel) -> bool:
        return self.has_weights_of(model) and self._side is model.side

    def has_weights_of(self, model: GlobalModel) -> bool:
        return self._weights is model.weights

    def share(self, other: RoundQuantizer) -> None:
        """Take over what one of the same weights has quantized: side tensors do not matter to it."""
        self._cache, self._packed, self._errors = other._cache, other._packed, other._errors

    def layer(self, name: str, bits: int) -> QuantizedLayer:
        key = name, bits
        if key not in self._cache:
            self._cache[key] = QuantizedLayer.from_weights(
                self._weights[name], bits, self._recipe.step_rule, self._recipe.per_channel
            )
        return self._cache[key]

    def layers(self, widths: Sequence[int]) -> Layers:
        """The model at these bit-widths."""
        return {
            node.name: self.layer(node.name, b) for node, b in zip(self._graph.layers, widths, strict=True)
        }

    def packed(self, widths: Sequence[int]) -> dict[str, PackedLayer]:
        """The same as clients are sent it; those who are sent the same layer share it."""
        keys = [(node.name, bits) for node, bits in zip(self._graph.layers, widths, strict=True)]
        self._packed |= {key: self.layer(*key).pack() for key in keys if key not in self._packed}
        return {name: self._packed[name, bits] for name, bits in keys}

    def side(self, widths: tuple[int, ...]) -> Side:
        """The side tensors that go with the model at these bit-widths."""
        if self._recipe.statistics == "averaged":
            return self._side
        if widths not in self._sides:
            quantized = dequantize_all(self.layers(widths))
            self._sides[widths] = quantized_statistics(self._graph, self._weights, quantized, self._side)
        return self._sides[widths]

    def sent_side(self, widths: tuple[int, ...]) -> Side:
        """The same, rounded as clients are sent them; every upload is checked against it."""
        # One serves all bit-widths where the statistics stay: clients may be many, and each dealt its own.
        key = () if self._recipe.statistics == "averaged" else widths
        if key not in self._sent_sides:
            self._sent_sides[key] = rounded_side(self.side(widths), self._recipe.plan.side_bits)
        return self._sent_sides[key]

    def errors(self) -> NDArray[np.float64]:
        """`|W - Q_b(W)|^2 / |W|^2` for each layer and `b` in 1..8.

        BatchNorm makes a layer's output indifferent to the size of its weights, so the relative error is what
        counts.
        """
        if self._errors is None:
            self._errors = self._measure_errors()
        return self._errors

    def _measure_errors(self) -> NDArray[np.float64]:
        rows = []
        for node in self._graph.layers:
            weights = self._weights[node.name]
            power = max(float(np.square(weights, dtype=np.float64).sum()), 1e-30)
            noise = [weights - self.layer(node.name, b).weights() for b in range(1, MAX_BITS + 1)]
            rows.append([float(np.square(n, dtype=np.float64).sum()) / power for n in noise])
        return np.array(rows, dtype=np.float64)


class QuantizedMethod:
    """FedMPQ, AQFL, FPQ8 and the ablations: one run of a recipe on a graph.

    A method of one's own may be a subclass with another `deal` or `merge`.
    """

    def __init__(self, graph: Graph, recipe: Recipe, seed: int) -> None:
        self.graph = graph
        self.recipe = recipe
        self.seed = seed
        self._quantizers: list[RoundQuantizer] = []

    def start(self, weights: Weights, side: Side, clients: Sequence[ClientRecord]) -> GlobalModel:
        """The model before the first round; every layer starts from the clients' mean budget."""
        budgets = [self._bits(c) for c in clients]
        mean_budget = float(np.dot(participation_weights(budgets, [c.samples for c in clients]), budgets))
        widths = (min(MAX_BITS, int(mean_budget + 0.5)),) * len(self.graph.layers)
        return GlobalModel(0, weights, side, widths, tuple(clients))

    def deal(self, model: GlobalModel, client: ClientRecord) -> tuple[int, ...]:
        """The client's bit-widths for the next round."""
        return _DEALS[self.recipe.deal](self, model, client)

    def deployments(self, model: GlobalModel, clients: Iterable[ClientRecord]) -> list[Deployment]:
        """What the clients' devices run, each distinct assignment once."""
        final = model.final
        by_widths: dict[tuple[int, ...], list[ClientRecord]] = {}
        for client in clients:
            by_widths.setdefault(self.deal(final, client), []).append(client)
        quantizer = self.quantizer(final)
        return [
            Deployment(tuple(same), widths, quantizer.layers(widths), quantizer.side(widths))
            for widths, same in by_widths.items()
        ]

    def assign(self, model: GlobalModel, client: ClientRecord) -> Assignment:
        """What the client is sent for round `model.round + 1`."""
        widths, quantizer = self.deal(model, client), self.quantizer(model)
        layers, side = quantizer.packed(widths), quantizer.sent_side(widths)
        return Assignment(
            self.seed, model.round + 1, client.client, layers, side, self.recipe.plan_of(model.round + 1)
        )

    @property
    def calibrates(self) -> bool:
        """Whether what is handed out has statistics measured for it."""
        return self.recipe.statistics == "calibrated" and bool(statistics_names(self.graph))

    def calibration(self, model: GlobalModel, client: ClientRecord) -> Assignment:
        """What the client's device would run after `model.round` rounds, for it to measure the statistics."""
        final = model.final
        widths, quantizer = self.deal(final, client), self.quantizer(final)
        layers, side = quantizer.packed(widths), quantizer.sent_side(widths)
        return Assignment(self.seed, model.round, client.client, layers, side, self.recipe.plan)

    def calibrated(self, model: GlobalModel, found: Iterable[Calibration]) -> GlobalModel:
        """The model with the statistics that clients measured of what it hands out, merged by their samples.

        Clients measured them of quantized weights `Q`. They are moved from there to the weights that all `Q`
        are made of, so that every client's data counts for every budget; `RoundQuantizer.side` moves them on
        to the weights of each. Calibrations come in ascending order of their clients.
        """
        final, records = model.final, {client.client: client for client in model.clients}
        quantized: dict[tuple[int, ...], Weights] = {}
        samples: list[float] = []
        moved: list[Side] = []
        for one in _checked(found, records, model.round, "calibration"):
            sender = records[one.client]
            widths = self._dealt(final, sender)
            if widths not in quantized:
                quantized[widths] = dequantize_all(self.quantizer(final).layers(widths))
            side = {**final.side, **one.statistics}
            there = unquantized_statistics(self.graph, final.weights, quantized[widths], side)
            moved.append({name: there[name] for name in one.statistics})
            samples.append(min(one.samples, sender.samples))
        fleet = [client.samples for client in model.clients]
        merged = MergedStatistics()
        for weight, statistics in zip(
            limited_weights(samples, fleet, self.recipe.share_limit), self._side_kept(moved), strict=True
        ):
            merged.add(float(weight), statistics)
        return model.with_final_side({**final.side, **merged.statistics()})

    def calibrated_on(self, model: GlobalModel, images: NDArray[np.uint8]) -> GlobalModel:
        """The same with statistics measured here on these images; assignments count by their clients."""
        draws = Draws(self.seed, SERVER, model.round)
        found: list[Calibration] = []
        for each in self.deployments(model, model.clients):
            batches = calibration_batches(draws, self.recipe.plan.batch_size, images)
            statistics = measure(self.graph, each.layers, each.side, batches)
            found.append(Calibration(model.round, each.clients[0].client, len(each.clients), statistics))
        return self.calibrated(model, sorted(found, key=lambda one: one.client))

    def merge(self, model: GlobalModel, updates: Iterable[Update]) -> GlobalModel:
        """The next global model. Updates come in ascending order of their clients, so the sums do not depend
        on who was first.

        They are gone through several times and each is dropped after use: memory is that of the model, and of
        all updates only where the rule of aggregation needs them. An iterator is read into a list.
        """
        again = list(updates) if iter(updates) is updates else updates
        records = {client.client: client for client in model.clients}
        senders: list[ClientRecord] = []
        sides: list[Side] = []
        for update in _checked(again, records, model.round + 1, "update"):
            sender = records[update.client]
            # What the server knew when it chose the client; a larger claim since then does not count.
            counted = min(update.samples, sender.samples)
            widths = bit_widths(self.graph, update.layers)
            senders.append(
                replace(sender, samples=counted, dealt=self._dealt(model, sender), returned=widths)
            )
            sides.append(update.side)
        changes = self._changes(model, again, senders)
        counted_by = votes(self.recipe.aggregation, self._merge_weights(model, senders), changes)
        new = self._merge_layers(model, changes, counted_by)
        weights = counted_by.weights
        new_side = summed(weights, self._side_kept(sides)).mean()
        # Nobody has trained these; an average of their quantized forms would move them all the same.
        new |= {name: model.weights[name] for name in self.graph.frozen_layers}
        new_side |= {name: model.side[name] for name in self.graph.frozen_side}
        seen = {one.client: replace(one, samples=records[one.client].samples) for one in senders}
        return GlobalModel(
            model.round + 1,
            new,
            new_side,
            average_bit_widths(weights / math.fsum(weights), [one.returned or () for one in senders]),
            tuple(seen.get(client.client, client) for client in model.clients),
            next_average(model, new, new_side, self.recipe.averaging),
        )

    def _merge_weights(self, model: GlobalModel, senders: Sequence[ClientRecord]) -> NDArray[np.float64]:
        """What each sender counts: its data, and its bits where they count, within what is plausible."""
        own, fleet = ([self._share(c) * c.samples for c in group] for group in (senders, model.clients))
        if not sum(own) > 0:
            raise MergeError("no client has any samples; a round needs at least one update trained on data")
        return limited_weights(own, fleet, self.recipe.share_limit)

    def _changes(
        self, model: GlobalModel, updates: Iterable[Update], senders: Sequence[ClientRecord]
    ) -> Changes:
        def read(names: Sequence[str]) -> Iterator[Weights]:
            for sender, update in zip(senders, updates, strict=True):
                assert sender.dealt is not None
                yield self._contribution(model, sender.dealt, update, names)

        shapes = {node.name: self.graph.weight_shape(node.name) for node in self.graph.layers}
        return Changes(shapes, len(senders), read)

    def _merge_layers(
        self, model: GlobalModel, changes: Changes, counted_by: Votes
    ) -> dict[str, NDArray[np.float32]]:
        merged = middle_changes(self.recipe.aggregation, changes) or counted_by.merged(changes)
        return merge_models(merged) if self._averages_models else merge_deltas(model.weights, merged)

    def _side_kept(self, sides: Sequence[Side]) -> Sequence[Side]:
        """Side tensors as they count: within the majority's range, unless the rule is a plain mean."""
        return sides if self.recipe.aggregation == "mean" else within_majority(sides)

    @property
    def _averages_models(self) -> bool:
        """Whether whole models are averaged, as in the paper; other rules go by what clients have changed."""
        return self.recipe.merge == "models" and self.recipe.aggregation == "mean"

    def _bits(self, client: ClientRecord) -> float:
        """The client's bits per weight, `v_n`: its budget, unless everyone gets 8 bits."""
        return float(MAX_BITS) if self.recipe.deal == "full" else client.budget

    def _share(self, client: ClientRecord) -> float:
        """What each of the client's samples counts in a merge."""
        return self._bits(client) if self.recipe.weigh_by == "bits" else 1.0

    def quantizer(self, model: GlobalModel) -> RoundQuantizer:
        """One for as long as the model is the same; what it quantized serves the same weights longer."""
        for known in self._quantizers:
            if known.is_of(model):
                return known
        related = [known for known in self._quantizers if known.has_weights_of(model)]
        others = [known for known in self._quantizers if known not in related]
        new = RoundQuantizer(self.graph, model.weights, model.side, self.recipe)
        if related:
            new.share(related[0])
        # Two are in use at a time: of the model that is trained and of the one that is handed out.
        self._quantizers = [*others[-1:], new]
        return new

    def _dealt(self, model: GlobalModel, client: ClientRecord) -> tuple[int, ...]:
        """What the client was sent: as it is on record, or else as it is dealt, which is the same."""
        return model.dealt.get(client.client) or self.deal(model, client)

    def _contribution(
        self, model: GlobalModel, widths: tuple[int, ...], update: Update, names: Sequence[str]
    ) -> Weights:
        """What the update adds to the layers named; its client was sent the model at these bit-widths."""
        returned = unpack_layers(self.graph, {name: update.layers[name] for name in names})
        if self._averages_models:
            return dequantize_all(returned)
        if self.recipe.merge == "models":
            return {name: layer.weights() - model.weights[name] for name, layer in returned.items()}
        sent = self.quantizer(model).layers(widths)
        if self.recipe.plan.update == "carried":
            return {
                name: change_within_cells(model.weights[name], sent[name], change)
                for name, change in returned.items()
            }
        return {name: layer.weights() - sent[name].weights() for name, layer in returned.items()}


Answer = TypeVar("Answer", Update, Calibration)


def _checked(
    answers: Iterable[Answer], records: Mapping[int, ClientRecord], round_number: int, what: str
) -> Iterator[Answer]:
    last = -1
    for answer in answers:
        if answer.client not in records:
            raise MergeError(f"the {what} of client {answer.client}: this run does not have that client")
        if answer.round != round_number:
            raise MergeError(
                f"the {what} of client {answer.client} is of round {answer.round}, not {round_number}"
            )
        if answer.client == last:
            raise MergeError(f"client {answer.client} sent two {what}s; a round takes one from each")
        if answer.client < last:
            raise MergeError(f"the {what} of client {answer.client} comes after {last}'s; merge in order")
        last = answer.client
        yield answer


def select_clients(
    clients: Sequence[ClientRecord], seed: int, round_number: int, count: int
) -> list[ClientRecord]:
    """`count` clients drawn without replacement, in the order of their numbers."""
    if not 1 <= count <= len(clients):
        raise ValueError(f"cannot select {count} of {len(clients)} clients")
    keys = Draws(seed, SERVER, round_number).uniform(len(clients), Purpose.SELECT)
    chosen = sorted(np.argsort(keys, kind="stable")[:count])
    return [clients[index] for index in chosen]


def _deal_pruning_growing(
    method: QuantizedMethod, model: GlobalModel, client: ClientRecord
) -> tuple[int, ...]:
    sizes = method.graph.layer_sizes
    return deal_paper(model.bit_widths, sizes, client.growth(len(sizes)), client.budget)


def _deal_least_error(method: QuantizedMethod, model: GlobalModel, client: ClientRecord) -> tuple[int, ...]:
    return deal_best(method.graph.layer_sizes, method.quantizer(model).errors(), client.budget)


def _deal_uniform(method: QuantizedMethod, model: GlobalModel, client: ClientRecord) -> tuple[int, ...]:
    """The budget on every layer; without re-dealing, what was pruned stays pruned."""
    if client.returned is not None:
        return client.returned
    check_bits(int(client.budget))
    return (int(client.budget),) * len(method.graph.layers)


def _deal_full(method: QuantizedMethod, model: GlobalModel, client: ClientRecord) -> tuple[int, ...]:
    return (MAX_BITS,) * len(method.graph.layers)


_DEALS: dict[str, Callable[[QuantizedMethod, GlobalModel, ClientRecord], tuple[int, ...]]] = {
    "pruning_growing": _deal_pruning_growing,
    "least_error": _deal_least_error,
    "uniform": _deal_uniform,
    "full": _deal_full,
}
