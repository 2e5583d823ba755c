"""The weights after a round by another way than the method's: one weight at a time, in plain numbers.

With the weight `w_n` of client `n` (its samples, times its bits where the recipe says so), codes `c`, the
zero point `z` and the step `s` of a layer, and `d_n` what the client says that a weight has moved by:

    carried change   d_n = j (c - z) s / 256; the client ended at the code nearest to its own code, moved so,
                     and W + d_n is kept within half a step of that code
    returned model   d_n = s (c_returned - z) - s (c_sent - z'); or the returned value itself is averaged
    merge            W + sum_n w_n f_n d_n / sum_n w_n, f_n being 1 for a plain mean

Where merges are asynchronous, codes and `W` of a change are those of the version its client was sent, and a
change of S merges ago has the weight (1 + S)^-power w_n.

Weights `w_n` and factors `f_n` of a rule that trusts clients differently are the rule's own (method.robust),
which has references of its own in its tests.

A place whose client ended just between two codes is left out: rounding decides there, not the formula.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fedmpq.exchange.messages import unpack_layers
from fedmpq.method.merging import Returned, changes_of
from fedmpq.method.robust import Votes, votes
from fedmpq.model.quantized import QuantizedLayer

if TYPE_CHECKING:
    from tests.history.replay import Replay, Step

PLACES = 40
"""Weights of each layer that are computed; a small layer's all."""
_TIE = 1e-3
_CLOSE = 1e-4


def slow_weights_differ(replay: Replay, step: Step) -> bool:
    """Whether any weight after the training step is not what the formulas give."""
    return any(abs(found - made) > room for found, made, room in _compared(replay, step))


def _compared(replay: Replay, step: Step) -> Iterator[tuple[float, float, float]]:
    """The method's weight, the formulas', and how far they may be apart for rounding alone."""
    recipe, graph = replay.method.recipe, replay.graph
    seats = {seat.client: seat for seat in step.round.seats}
    counted = _counted(replay, step)
    parties = []
    for place, update in enumerate(step.updates):
        base = step.bases[update.client]
        sent = replay.method.quantizer(base).layers(seats[update.client].bit_widths)
        factors = {name: 1.0 if counted.factors is None else counted.factors[name][place] for name in sent}
        age = (1 + step.sent.round - base.round) ** -replay.config.staleness_power
        returned = unpack_layers(graph, update.layers)
        parties.append((counted.weights[place] * age, factors, base.weights, sent, returned))
    for name, before in step.sent.weights.items():
        if name in graph.frozen_layers:
            continue
        flat, after = before.reshape(-1), step.model.weights[name].reshape(-1)
        for place in range(0, flat.size, max(1, flat.size // PLACES)):
            channel = place // (flat.size // before.shape[0])
            total, weights = 0.0, 0.0
            for weight, factors, base_weights, sent, returned in parties:
                value = _moved(
                    recipe,
                    float(base_weights[name].reshape(-1)[place]),
                    _at(sent[name], place, channel),
                    returned[name],
                    place,
                    channel,
                )
                total, weights = total + weight * factors[name] * value, weights + weight
            if math.isnan(total):
                continue
            start = 0.0 if recipe.merge == "models" else float(flat[place])
            room = _CLOSE * max(float(np.abs(before).max()), 1e-3)
            yield float(after[place]), start + total / weights, room


def _counted(replay: Replay, step: Step) -> Votes:
    """What each client counts: its samples as of when it was chosen, times its bits where they count."""
    recipe, method = replay.method.recipe, replay.method
    records = {client.client: client for client in step.sent.clients}
    seats = {seat.client: seat for seat in step.round.seats}
    senders, own = [], []
    for update in step.updates:
        record = records[update.client]
        bits = 8.0 if recipe.deal == "full" else record.budget
        own.append(min(update.samples, record.samples) * (bits if recipe.weigh_by == "bits" else 1.0))
        senders.append(replace(record, dealt=seats[update.client].bit_widths))
    fleet = [c.samples * (c.budget if recipe.weigh_by == "bits" else 1.0) for c in step.sent.clients]
    limit = math.inf if recipe.share_limit is None else recipe.share_limit * _median(fleet)
    weights = np.array([min(one, limit) for one in own])
    returned = Returned(step.updates)
    for update in step.updates:
        returned.take(update.layers)
    return votes(recipe.aggregation, weights, changes_of(method._merging(step.sent), senders, returned))


def _median(numbers: list[float]) -> float:
    """The median."""
    ordered, half = sorted(numbers), len(numbers) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _at(layer: QuantizedLayer, place: int, channel: int) -> tuple[float, float, int]:
    """The centred code, the step and the bits of one weight."""
    zero = 128.0 if layer.bits == 8 else (2**layer.bits - 1) / 2
    steps = layer.step.reshape(-1)
    step = float(steps[channel] if steps.size > 1 else steps[0])
    return float(layer.codes.reshape(-1)[place]) - zero, step, layer.bits


def _moved(
    recipe: Any,
    weight: float,
    sent: tuple[float, float, int],
    returned: QuantizedLayer,
    place: int,
    channel: int,
) -> float:
    """What the client adds at the place; NaN where rounding decides."""
    centred, step, bits = sent
    came, own_step, _ = _at(returned, place, channel)
    if recipe.plan.update != "carried":
        return own_step * came if recipe.merge == "models" else own_step * came - step * centred
    moved = own_step * came / 256
    half = 0.0 if bits == 8 else 0.5
    # Codes lie at whole numbers plus `half`, from the lowest to the highest that the bits have.
    least, most = (-127.0, 127.0) if bits == 8 else (-(2**bits - 1) / 2, (2**bits - 1) / 2)
    position = centred + moved - half
    if abs(position - math.floor(position) - 0.5) < _TIE:
        return math.nan
    ended = min(max(math.floor(position + 0.5) + half, least), most)
    low = -math.inf if ended == least else step * (ended - 0.5)
    high = math.inf if ended == most else step * (ended + 0.5)
    return min(max(weight + moved * step, low), high) - weight
