"""The methods that train in full precision: FP32 (FedAvg), and FedPAQ and UVeQFed, which compress uploads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from fedmpq.exchange.float_messages import Compression, FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Calibration, TrainingPlan
from fedmpq.method.aggregate import WeightedSum, merge_deltas, next_average, participation_weights
from fedmpq.method.recipe import Statistics
from fedmpq.method.schedule import Schedule
from fedmpq.method.state import ClientRecord, Deployment, GlobalModel
from fedmpq.model.calibration import MergedStatistics, statistics_names
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.randomness import Draws

FLOAT_BITS = 32


@dataclass(frozen=True)
class FloatRecipe:
    """What FedAvg can be given: compressed uploads, a moving average, calibrated statistics, a schedule."""

    compression: Compression = "none"
    averaging: float = 0.0
    statistics: Statistics = "averaged"
    plan: TrainingPlan = field(default_factory=TrainingPlan)
    schedule: Schedule = field(default_factory=Schedule)


class FloatMethod:
    """FedAvg on a graph, with a compression of what clients upload."""

    def __init__(self, graph: Graph, recipe: FloatRecipe, seed: int) -> None:
        self.graph = graph
        self.recipe = recipe
        self.seed = seed

    def start(self, weights: Weights, side: Side, clients: Sequence[ClientRecord]) -> GlobalModel:
        return GlobalModel(0, weights, side, (FLOAT_BITS,) * len(self.graph.layers), tuple(clients))

    def assign(self, model: GlobalModel, client: ClientRecord) -> FloatAssignment:
        number = model.round + 1
        return self._assignment(number, client, model, self.recipe.schedule.plan(self.recipe.plan, number))

    def merge(self, model: GlobalModel, updates: Iterable[FloatUpdate]) -> GlobalModel:
        """`W + sum p_n * decoded change`, `p_n` by the data alone."""
        ordered = sorted(updates, key=lambda update: update.client)
        shares = participation_weights([1.0] * len(ordered), [update.samples for update in ordered])
        changes, side = WeightedSum(), WeightedSum()
        for share, update in zip(shares, ordered, strict=True):
            draws = Draws(self.seed, update.client, update.round)
            changes.add(float(share), update.changes.decoded(draws))
            side.add(float(share), update.side)
        new, new_side = merge_deltas(model.weights, changes), side.mean()
        average = next_average(model, new, new_side, self.recipe.averaging)
        return replace(model, round=model.round + 1, weights=new, side=new_side, average=average)

    @property
    def calibrates(self) -> bool:
        return self.recipe.statistics == "calibrated" and bool(statistics_names(self.graph))

    def calibration(self, model: GlobalModel, client: ClientRecord) -> FloatAssignment:
        return self._assignment(model.round, client, model.final, self.recipe.plan)

    def calibrated(self, model: GlobalModel, found: Iterable[Calibration]) -> GlobalModel:
        merged = MergedStatistics()
        for one in found:
            merged.add(one.samples, one.statistics)
        return model.with_final_side({**model.final.side, **merged.statistics()})

    def deployments(self, model: GlobalModel, clients: Iterable[ClientRecord]) -> list[Deployment]:
        """None: every device runs `W`, or its moving average, in full precision."""
        return []

    def _assignment(
        self, number: int, client: ClientRecord, model: GlobalModel, plan: TrainingPlan
    ) -> FloatAssignment:
        return FloatAssignment(
            self.seed,
            number,
            client.client,
            client.budget,
            model.weights,
            model.side,
            plan,
            self.recipe.compression,
        )
