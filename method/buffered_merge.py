"""A merge of changes that were made of several versions of the model (FedBuff, Nguyen et al., 2022).

With `t` the model's version, `v_n` that of the model which client `n` was sent, `C_n` its change of that one
and `w_n` what it counts (its data) times the factor of its staleness (`staleness`):

    W_(t+1) = W_t + sum w_n C_n / sum w_n

Changes are sums of whole numbers for each version, layer and bit-width, since each has a step of its own:
exact in any order. Steps are folded in once at the end, the earliest version and the least bits first.

A side tensor `s_n` is moved by what has become of it since the client was sent it, and then averaged, in the
order of versions and clients: `s_n + (s_t - s_v)` for what is learnt, `s_n s_t / s_v` for clips, which are
positive and stay so. BatchNorm's statistics are measured and not learnt, and are averaged as they are.

Where all changes are of version `t` this is the plain mean of a round, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.messages import Update
from fedmpq.method.aggregate import MergeError, average_bit_widths, moved_by, next_average
from fedmpq.method.merging import Answers, MergingRound
from fedmpq.method.robust import summed
from fedmpq.method.round_quantizer import RoundQuantizer
from fedmpq.method.running_merge import WholeLayers
from fedmpq.method.staleness import Buffering
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model.calibration import STATISTICS
from fedmpq.model.quantized import Side, Weights


@dataclass(frozen=True)
class Version:
    """A version of the model that clients were sent, with its layers on their grids."""

    model: GlobalModel
    """Its `dealt` has the bit-widths, and its `clients` the records, of those who were sent it."""
    quantizer: RoundQuantizer

    def sent_to(self, client: ClientRecord, widths: tuple[int, ...]) -> Version:
        """The same when one more client has been sent it, at these bit-widths."""
        records = {record.client: record for record in (*self.model.clients, client)}
        clients = tuple(records[number] for number in sorted(records))
        dealt = {**self.model.dealt, client.client: widths}
        return replace(self, model=replace(self.model, clients=clients, dealt=dealt))


class _Part:
    """The changes of one version."""

    def __init__(self, base: MergingRound, largest: float) -> None:
        self.base = base
        self.answers = Answers(base)
        self.layers = WholeLayers(base, largest)


class BufferedMerge:
    """Changes of several versions of the model on their way into the next one."""

    def __init__(self, merging: MergingRound, versions: Mapping[int, MergingRound]) -> None:
        """`merging` is of the newest model; `versions` has those that clients were sent, by their numbers."""
        if merging.recipe.buffering is None or not merging.in_integers:
            raise MergeError("this recipe merges in rounds; give it a buffering, merge 'deltas' and 'mean'")
        self._buffering: Buffering = merging.recipe.buffering
        self._merging = merging
        self._parts = {
            number: _Part(base, merging.largest_weight) for number, base in sorted(versions.items())
        }

    def add(self, update: Update) -> None:
        """Add one change; one that does not belong here is a MergeError and changes nothing."""
        version = update.round - 1
        if version not in self._parts:
            raise MergeError(
                f"the update of client {update.client} is of version {version} of the model; "
                f"those in flight are {', '.join(map(str, self._parts)) or 'none'}"
            )
        if reason := self._buffering.refusal(version, self._merging.model.round):
            raise MergeError(f"the update of client {update.client}: {reason}")
        part = self._parts[version]
        sender = part.answers.sender(update)
        part.layers.add(sender, update.layers, self._weight(sender, version))
        part.answers.take(sender, update)

    def finish(self) -> GlobalModel:
        """The next version of the model. The merge is used up."""
        parts = {number: part for number, part in self._parts.items() if part.answers.senders}
        if not parts:
            raise MergeError("there is no change to merge")
        merging, model = self._merging, self._merging.model
        total = sum(part.layers.weight for part in parts.values())
        new: Weights = {}
        for node in merging.graph.layers:
            first, *others = (part.layers.taken(node.name) for part in parts.values())
            for other in others:
                first += other
            new |= moved_by(model.weights, {node.name: first}, total)
        new |= {name: model.weights[name] for name in merging.graph.frozen_layers}
        senders = [(number, one) for number, part in parts.items() for one in part.answers.senders]
        weights = np.array([self._weight(one, number) for number, one in senders], np.float64)
        sides = [
            moved_side(side, part.base.model.side, model.side)
            for part in parts.values()
            for side in part.answers.sides
        ]
        new_side = summed(weights, sides).mean()
        new_side |= {name: model.side[name] for name in merging.graph.frozen_side}
        return GlobalModel(
            model.round + 1,
            new,
            new_side,
            average_bit_widths(weights / math.fsum(weights), [one.returned or () for _, one in senders]),
            _known(model, [one for _, one in senders]),
            next_average(model, new, new_side, merging.recipe.averaging),
        )

    def _weight(self, sender: ClientRecord, version: int) -> float:
        factor = self._buffering.factor(self._merging.model.round - version)
        # What it counted for when it was sent its version may be more than anybody counts for by now.
        return min(float(self._merging.weights([sender])[0]), self._merging.largest_weight) * factor


def _known(model: GlobalModel, senders: list[ClientRecord]) -> tuple[ClientRecord, ...]:
    """The model's clients, with the bits that senders were dealt and gave back, the newest last."""
    last = {one.client: (one.dealt, one.returned) for one in senders}
    return tuple(
        replace(record, dealt=last[record.client][0], returned=last[record.client][1])
        if record.client in last
        else record
        for record in model.clients
    )


def moved_side(side: Side, sent: Side, newest: Side) -> Side:
    """A client's side tensors, moved by what has become of those it was sent: in float64, rounded once."""
    return {name: _moved(name, tensor, sent[name], newest[name]) for name, tensor in side.items()}


def _moved(
    name: str, tensor: NDArray[np.float32], sent: NDArray[np.float32], newest: NDArray[np.float32]
) -> NDArray[np.float32]:
    part = name.rpartition(".")[2]
    if part in STATISTICS:
        return tensor
    wide, old, new = (each.astype(np.float64) for each in (tensor, sent, newest))
    if part == "clip":
        return np.asarray(wide * (new / old) if old > 0 < new else wide, np.float32)
    return np.asarray(wide + (new - old), np.float32)
