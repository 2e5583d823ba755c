"""A quantized method on the server: deal bit-widths, quantize what goes out, merge what comes back.

Pure functions of the global model, so that the server, a simulation, and a replay after a crash do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import Assignment, Calibration, Update
from fedmpq.method.aggregate import MergeError, participation_weights
from fedmpq.method.buffered_merge import BufferedMerge, Version
from fedmpq.method.merging import MergingRound, in_order, merge_by_rule
from fedmpq.method.pruning_growing import deal_paper
from fedmpq.method.recipe import Recipe
from fedmpq.method.robust import limited_weights, within_majority
from fedmpq.method.round_quantizer import RoundQuantizer
from fedmpq.method.running_merge import RunningMerge
from fedmpq.method.state import ClientRecord, Deployment, GlobalModel
from fedmpq.model.batch_statistics import unquantized_statistics
from fedmpq.model.calibration import MergedStatistics, calibration_batches, measure, statistics_names
from fedmpq.model.graph import Graph
from fedmpq.model.grid import MAX_BITS, check_bits
from fedmpq.model.quantized import Side, Weights, dequantize_all
from fedmpq.model.randomness import SERVER, Draws, Purpose


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
        for one in _checked(found, records, model.round):
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
        """The next global model. Updates come in ascending order of their clients, so that sums of
        floating-point numbers do not depend on who was first; sums of whole numbers never do (`merging`).

        Each is read once and dropped after use where the rule is a mean. Other rules hold what all have
        returned, packed, or read it several times if it is too much.
        """
        if self.recipe.aggregation != "mean":
            return merge_by_rule(self._merging(model), updates)
        merging = self.begin(model)
        for update in in_order(updates):
            merging.add(update)
        return merging.finish()

    def begin(self, model: GlobalModel) -> RunningMerge:
        """A merge by the plain mean, to which updates are added as they arrive; `finish` gives the model."""
        return RunningMerge(self._merging(model))

    @property
    def sums_in_parts(self) -> bool:
        """Whether updates may be merged in parts, whose sums are merged: in any tree, with one result."""
        return self.recipe.aggregation == "mean" and self.recipe.merge == "deltas"

    def version(self, model: GlobalModel) -> Version:
        """The model as one that clients are sent while others come after it."""
        return Version(model, self.quantizer(model))

    def buffer(self, model: GlobalModel, versions: Mapping[int, Version]) -> BufferedMerge:
        """A merge of changes of these versions of the model into `model`, to which they are added as they
        arrive; `finish` gives the next version."""
        known = {
            number: self._merging(version.model, version.quantizer) for number, version in versions.items()
        }
        return BufferedMerge(self._merging(model), known)

    def _merging(self, model: GlobalModel, quantizer: RoundQuantizer | None = None) -> MergingRound:
        return MergingRound(
            self.graph,
            self.recipe,
            model,
            quantizer or self.quantizer(model),
            lambda client: self._dealt(model, client),
            self._share,
        )

    def _side_kept(self, sides: Sequence[Side]) -> Sequence[Side]:
        """Side tensors as they count: within the majority's range, unless the rule is a plain mean."""
        return sides if self.recipe.aggregation == "mean" else within_majority(sides)

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


def _checked(
    answers: Iterable[Calibration], records: Mapping[int, ClientRecord], round_number: int
) -> Iterator[Calibration]:
    last = -1
    for answer in answers:
        if answer.client not in records:
            raise MergeError(f"the calibration of client {answer.client}: this run does not have that client")
        if answer.round != round_number:
            raise MergeError(
                f"the calibration of client {answer.client} is of round {answer.round}, not {round_number}"
            )
        if answer.client == last:
            raise MergeError(f"client {answer.client} sent two calibrations; a round takes one from each")
        if answer.client < last:
            raise MergeError(
                f"the calibration of client {answer.client} comes after {last}'s; merge in order"
            )
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
    return method.quantizer(model).dealt(client.budget)


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
