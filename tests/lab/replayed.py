"""What a run's recorded history comes to when it is computed again, one change after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fedmpq.exchange.messages import Assignment, Update, bit_widths
from fedmpq.lab.pool import Pool
from fedmpq.method.buffered_merge import Version
from fedmpq.method.history import RoundFacts
from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import GlobalModel


def replayed(
    method: QuantizedMethod,
    first: GlobalModel,
    rounds: Iterable[RoundFacts],
    pool: Pool[Assignment, Update],
) -> list[GlobalModel]:
    """The model before the first merge and after each, from which changes went into which merge alone.

    Statistics of what is handed out are left as training has them.
    """
    models = [first]
    for facts in rounds:
        newest = models[-1]
        versions: dict[int, Version] = {}
        updates: list[Update] = []
        for part in reversed(facts.clients):
            if part.outcome != "trained":
                continue
            number = newest.round - part.staleness
            model = models[number]
            sent = method.assign(model, model.clients[part.client])
            version = versions.get(number) or method.version(model)
            versions[number] = version.sent_to(
                model.clients[part.client], bit_widths(method.graph, sent.layers)
            )
            updates += list(pool.train([sent]))
        buffer = method.buffer(newest, versions)
        for update in updates:
            buffer.add(update)
        models.append(buffer.finish())
    return [replace(model, dealt={}) for model in models]
