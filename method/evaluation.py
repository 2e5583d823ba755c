"""How well the models do that the clients' devices run: by the integer forward on test data, or by report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Evaluation
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, Side


def accuracy(graph: Graph, layers: Layers, side: Side, test: Dataset) -> float:
    """Share of the images that the integer model gets right."""
    return DeployedModel(graph, layers, side).accuracy(test.images, test.labels)


def deployed_accuracies(method: QuantizedMethod, model: GlobalModel, test: Dataset) -> dict[int, float]:
    """By client: the accuracy of what its device runs now; each distinct assignment is measured once."""
    found: dict[int, float] = {}
    for each in method.deployments(model, model.clients):
        share = accuracy(method.graph, each.layers, each.side, test)
        found |= {client.client: share for client in each.clients}
    return found


def reported_accuracies(reports: Mapping[int, Evaluation | None]) -> dict[int, float]:
    """By client: what it measured, on its own data, of the model it was sent."""
    return {
        client: report.correct / report.samples
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
