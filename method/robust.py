"""Merging rules that no single client can bend far, whatever it sends and however much data it claims.

A rule turns the changes `C_n` of a round's clients, with weights `w_n` (their data), into one change. A
quarter of the clients, and at least one of three or more, may be hostile (`suspects`).

- "mean": `sum w_n C_n / sum w_n`. Any client can move it as far as it likes.
- "agreement": the mean with `w_n t_n` for `w_n`, after every layer of `C_n` was shortened. Nobody pulls a
  layer harder than `PULL` times the median of the round: `w_n |C_n| <= PULL * median_k(w_k |C_k|)`. The trust
  `t_n` is 1 for a client that goes the way of the others, down to 0 for one that goes against it: with `a_n`
  the median over the others `k` of the cosine between what is left of `C_n` and `C_k`, all layers made
  equally long, `t_n = a_n / (DOUBT * median_k(a_k))` within 0..1. Where the clients have no common way, that
  median not being positive, the `f` with the least `a_n` are left out. Where all are within the limit and
  trusted, it is the mean.
- "trimmed_mean", "median": weight by weight, without the `f` largest and smallest values, or the middle one.
- "krum": the one update that lies nearest to its `n - f - 2` nearest others; "multi_krum": the mean of the
  `n - f` that do. (Blanchard et al., 2017; Yin et al., 2018 for the two before.)

The last four count every client once, whatever its data. Changes are compared layer by layer, as many layers
at a time as fit into `GROUP_BYTES`, and summed one client after the other. With fewer than three clients
there is no majority to go by, and every rule is a mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fedmpq.method.aggregate import MergeError, WeightedSum

Aggregation = Literal["mean", "agreement", "trimmed_mean", "median", "krum", "multi_krum"]
Array = NDArray[np.float64]
Tensors = Mapping[str, NDArray[np.float32]]

PULL = 1.5
"""How much harder than the median client one may pull a layer."""
DOUBT = 0.5
"""A client that agrees with the others by less than this share of what is usual loses weight."""
MAJORITY = 3
"""Fewer clients than this cannot outvote one."""
GROUP_BYTES = 1 << 24
"""Of changes held at a time while they are compared."""
_SUSPECT_SHARE = 4
_COLUMNS = 4096
_JOINED = "side tensors"
_DIGITS = 6
"""Of what a client counts: the last bits of a matrix product differ between machines, a merge must not."""


def suspects(clients: int) -> int:
    """`f`: how many of a round's clients may be hostile without harm."""
    return max(clients // _SUSPECT_SHARE, int(clients >= MAJORITY))


def limited_weights(weights: Sequence[float], fleet: Sequence[float], limit: float | None) -> Array:
    """The weights, none above `limit` times the median of the fleet's; None: as they are."""
    own = np.asarray(weights, np.float64)
    return own if limit is None else np.minimum(own, limit * float(np.median(fleet)))


class Comparable(Protocol):
    """Changes of which the scalar products are known."""

    def products(self) -> Iterator[tuple[str, Array]]:
        """Layer by layer: its name, and the scalar products of all clients' changes."""


@dataclass(frozen=True)
class Changes:
    """What the clients of a round have changed, in their order, read anew each time."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of the weights, by layer."""
    clients: int
    read: Callable[[Sequence[str]], Iterable[Tensors]]
    """Each client's changes of the layers named."""

    def all(self) -> Iterable[Tensors]:
        return self.read(tuple(self.shapes))

    def layers(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """One layer after the other: its name, and all clients' changes as rows."""
        for names in self._groups():
            rows = {
                name: np.empty((self.clients, math.prod(self.shapes[name])), np.float32) for name in names
            }
            for client, tensors in enumerate(self.read(names)):
                for name in names:
                    rows[name][client] = tensors[name].ravel()
            yield from rows.items()

    def products(self) -> Iterator[tuple[str, Array]]:
        """Layer by layer, the scalar products of all clients' changes."""
        for name, rows in self.layers():
            yield name, _products(rows)

    def _groups(self) -> Iterator[tuple[str, ...]]:
        group: list[str] = []
        held = 0
        for name, shape in self.shapes.items():
            needed = 4 * math.prod(shape) * self.clients
            if group and held + needed > GROUP_BYTES:
                yield tuple(group)
                group, held = [], 0
            group.append(name)
            held += needed
        yield tuple(group)


@dataclass(frozen=True)
class Votes:
    """What each client counts in a merge."""

    weights: Array
    factors: Mapping[str, Array] | None = None
    """By layer: what the clients' changes are multiplied by; None: nothing."""

    def merged(self, changes: Changes) -> WeightedSum:
        """The sum whose mean is the merged change."""
        return summed(self.weights, self._shortened(changes.all()))

    def _shortened(self, changes: Iterable[Tensors]) -> Iterator[Tensors]:
        for client, change in enumerate(changes):
            yield {name: self._scaled(name, client, tensor) for name, tensor in change.items()}

    def _scaled(self, name: str, client: int, tensor: NDArray[np.float32]) -> NDArray[np.float32]:
        factor = 1.0 if self.factors is None else float(self.factors[name][client])
        return tensor if factor == 1.0 else np.asarray(tensor * factor, np.float32)


def votes(rule: Aggregation, weights: Array, changes: Comparable) -> Votes:
    """What each client counts by a rule that weighs clients; weight by weight see `middle_changes`."""
    if rule == "agreement" and len(weights) >= MAJORITY:
        return _agreement(weights, changes)
    if rule in ("krum", "multi_krum") and len(weights) >= MAJORITY:
        count = 1 if rule == "krum" else len(weights) - suspects(len(weights))
        counted = np.zeros(len(weights))
        counted[_nearest(changes, len(weights), count)] = 1.0
        return Votes(counted)
    return Votes(weights)


def middle_changes(rule: Aggregation, changes: Changes) -> WeightedSum | None:
    """The merged change of a rule that goes weight by weight; None if this one does not."""
    if rule not in ("trimmed_mean", "median") or changes.clients < MAJORITY:
        return None
    trimmed = suspects(changes.clients) if rule == "trimmed_mean" else (changes.clients - 1) // 2
    kept = slice(trimmed, changes.clients - trimmed)
    middle = {
        name: np.sort(rows, axis=0)[kept]
        .mean(axis=0, dtype=np.float64)
        .astype(np.float32)
        .reshape(changes.shapes[name])
        for name, rows in changes.layers()
    }
    return summed(np.ones(1), [middle])


def summed(weights: Array, tensors: Iterable[Tensors]) -> WeightedSum:
    """The weighted sum of the clients' tensors, in their order."""
    total = WeightedSum()
    for weight, each in zip(weights, tensors, strict=True):
        total.add(float(weight), each)
    return total


def within_majority(tensors: Sequence[Tensors]) -> list[dict[str, NDArray[np.float32]]]:
    """Every number brought within the range that is left without the `f` largest and smallest of its place.

    So one client's number counts, but no further out than another's: for side tensors, of which a single one
    can ruin a network.
    """
    trimmed = suspects(len(tensors))
    if not trimmed:
        return [dict(each) for each in tensors]
    kept: list[dict[str, NDArray[np.float32]]] = [{} for _ in tensors]
    for name in tensors[0]:
        ordered = np.sort(np.stack([each[name] for each in tensors]), axis=0)
        low, high = ordered[trimmed], ordered[-1 - trimmed]
        for each, out in zip(tensors, kept, strict=True):
            out[name] = np.clip(each[name], low, high)
    return kept


def merged_sides(weights: Array, sides: Sequence[Tensors], *, robust: bool) -> dict[str, NDArray[np.float32]]:
    """The weighted mean of the clients' side tensors, in their order; if robust, `within_majority`.

    Tensors are many and small: all of a client's are one while they are merged.
    """
    shapes = {name: tensor.shape for name, tensor in sides[0].items()}
    rows = [_joined(shapes, side) for side in sides]
    if robust:
        rows = within_majority(rows)
    mean = summed(weights, rows).mean()[_JOINED]
    parts = np.split(mean, np.cumsum([math.prod(shape) for shape in shapes.values()])[:-1])
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def _joined(shapes: Mapping[str, tuple[int, ...]], side: Tensors) -> dict[str, NDArray[np.float32]]:
    if {name: tensor.shape for name, tensor in side.items()} != shapes or not side:
        raise MergeError("the side tensors of two updates differ in names or shapes; they are of one graph")
    joined = np.concatenate([side[name].reshape(-1) for name in shapes])
    if joined.dtype != np.float32 or not np.isfinite(joined).all():
        # It says of which tensor that is so.
        WeightedSum().add(1.0, side)
    return {_JOINED: joined}


def _agreement(weights: Array, changes: Comparable) -> Votes:
    factors: dict[str, Array] = {}
    products = np.zeros((len(weights), len(weights)))
    for name, of_layer in changes.products():
        lengths = np.sqrt(np.diag(of_layer))
        factors[name] = _pull_factors(weights * lengths).round(_DIGITS)
        # Who did not move a layer has no say in how long its changes are.
        usual = float(np.median(lengths[lengths > 0])) if lengths.any() else 1.0
        products += of_layer * np.outer(factors[name], factors[name]) / usual**2
    return Votes(weights * _trust(products).round(_DIGITS), factors)


def _pull_factors(pulls: Array) -> Array:
    """What brings each pull down to the limit, 1 where it is below."""
    limit = PULL * float(np.median(pulls[pulls > 0])) if pulls.any() else 0.0
    return np.where(pulls > limit, limit / np.where(pulls > 0, pulls, 1.0), 1.0)


def _trust(products: Array) -> Array:
    """`t_n`, from the scalar products of the clients' changes."""
    lengths = np.sqrt(np.diag(products))
    cosines = products / np.maximum(np.outer(lengths, lengths), np.finfo(np.float64).tiny)
    others = ~np.eye(len(cosines), dtype=bool)
    agreement = np.array([np.median(row[other]) for row, other in zip(cosines, others, strict=True)])
    usual = float(np.median(agreement))
    if usual > 0:
        return np.clip(agreement / (DOUBT * usual), 0.0, 1.0)
    trusted = np.ones(len(cosines))
    trusted[np.argsort(agreement, kind="stable")[: suspects(len(cosines))]] = 0.0
    return trusted


def _products(rows: NDArray[np.float32]) -> Array:
    """Scalar products of the rows, some columns at a time to spare memory."""
    total = np.zeros((len(rows), len(rows)))
    for start in range(0, rows.shape[1], _COLUMNS):
        wide = rows[:, start : start + _COLUMNS].astype(np.float64)
        total += wide @ wide.T
    return total


def _nearest(changes: Comparable, clients: int, count: int) -> list[int]:
    """The `count` clients with the least sum of squared distances to their nearest others, in order."""
    products = sum((of_layer for _, of_layer in changes.products()), np.zeros(()))
    lengths = np.diag(products)
    distances = lengths[:, None] + lengths[None, :] - 2 * products
    np.fill_diagonal(distances, np.inf)
    neighbours = max(1, clients - suspects(clients) - 2)
    scores = np.sort(distances, axis=1)[:, :neighbours].sum(axis=1)
    return sorted(int(one) for one in np.argsort(scores, kind="stable")[:count])
