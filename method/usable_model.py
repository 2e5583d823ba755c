"""Whether a merged model is one that boards can be dealt and can run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.deployed import DeployedModel


class UnusableModel(ValueError):
    """A merged model that cannot be dealt, run or exported."""


def check_usable(method: QuantizedMethod, model: GlobalModel) -> None:
    """Raises if a tensor is not finite, or if what the clients of the smallest and of the largest budget are
    sent, or the model they run at the same bit-widths, cannot be compiled to integers."""
    _require_finite(model)
    budgets = {method.deal(model, record): record.budget for record in _extremes(model)}
    for each in (model,) if model.final is model else (model, model.final):
        quantizer = method.quantizer(each)
        for widths, budget in budgets.items():
            try:
                # Compiled when it is first asked for.
                _ = DeployedModel(method.graph, quantizer.layers(widths), quantizer.sent_side(widths)).program
            except (ValueError, ArithmeticError) as error:
                raise UnusableModel(f"the merged model cannot be run at {budget:g} bits: {error}") from error


def _extremes(model: GlobalModel) -> list[ClientRecord]:
    by_budget = sorted(model.clients, key=lambda record: (record.budget, record.client))
    return [by_budget[0], by_budget[-1]] if len(by_budget) > 1 else by_budget


def _require_finite(model: GlobalModel) -> None:
    final = model.final
    groups: tuple[Mapping[str, Any], ...] = (model.weights, model.side, final.weights, final.side)
    for group in groups:
        for name, tensor in group.items():
            if not np.isfinite(tensor).all():
                raise UnusableModel(f"{name!r} of the merged model has NaN or infinity in it")
