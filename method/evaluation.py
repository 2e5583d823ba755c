"""How well the models do that the clients' devices run: by the integer forward on test data, or by report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fedmpq.data.dataset import Dataset
from fedmpq.data.tasks import anomalies
from fedmpq.exchange.messages import Evaluation
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.metrics import Score
from fedmpq.model.quantized import Layers, Side


def score(graph: Graph, layers: Layers, side: Side, test: Dataset) -> Score:
    """How well the integer model does at its task."""
    given = test.labels if test.targets is None else test.targets
    return DeployedModel(graph, layers, side).score(test.images, given, anomalous=anomalies(test))


def deployed_scores(method: QuantizedMethod, model: GlobalModel, test: Dataset) -> dict[int, Score]:
    """By client: how well does what its device runs now; each distinct assignment is measured once."""
    found: dict[int, Score] = {}
    for each in method.deployments(model, model.clients):
        measured = score(method.graph, each.layers, each.side, test)
        found |= {client.client: measured for client in each.clients}
    return found


def mean_others(scores: Mapping[int, Score]) -> dict[str, float]:
    """Metrics beside the task's own: means over the clients, in their order."""
    each = [scores[client].others for client in sorted(scores)]
    return {name: float(np.mean([others[name] for others in each])) for name in (each[0] if each else ())}


def reported_accuracies(reports: Mapping[int, Evaluation | None]) -> dict[int, float]:
    """By client: what it measured, on its own data, of the model it was sent."""
    return {
        client: report.value
        for client, report in reports.items()
        if report is not None and report.samples > 0
    }


def by_budget(accuracies: Mapping[int, float], clients: Iterable[ClientRecord]) -> dict[str, float]:
    """The mean over the clients of each budget."""
    groups: dict[float, list[float]] = {}
    for client in clients:
        if client.client in accuracies:
            groups.setdefault(client.budget, []).append(accuracies[client.client])
    return {f"{budget:g}": float(np.mean(groups[budget])) for budget in sorted(groups)}
