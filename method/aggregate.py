"""Merging the updates of one round (Eq. 14-15).

Updates enter one running float64 sum per tensor and are then forgotten: memory is that of the model,
whatever the number of clients. Floating-point addition is not associative, so callers add in the order of
client ids; then the same updates give the same global model to the bit, whatever order they arrived in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedmpq.method.pruning_growing import MIN_BITS
from fedmpq.method.state import Average, GlobalModel
from fedmpq.model.grid import MAX_BITS
from fedmpq.model.quantized import Side, Weights

# Weights p_n are quotients rounded to float64, so a mean that is exactly 2.5 may come out 1e-15 short and
# lose a bit. A mean truly below a half is short of it by at least 1 / (2 * sum of v_n |D_n|), more than this
# for any federation of under 5e8 sample-bits: the allowance mends rounding and never promotes an honest
# 2.49....
_HALF_TOLERANCE = 1e-9


class MergeError(ValueError):
    """An update that cannot be merged with the others of its round."""


def participation_weights(budgets: Sequence[float], samples: Sequence[int]) -> NDArray[np.float64]:
    """``p_n = v_n |D_n| / sum_k v_k |D_k|`` over the clients whose update arrived.

    Methods that train in full precision weigh by data alone: pass budgets of 1.
    """
    if len(budgets) != len(samples):
        raise MergeError(
            f"{len(budgets)} budgets but {len(samples)} sample counts; give one of each per client"
        )
    for client, (budget, count) in enumerate(zip(budgets, samples, strict=True)):
        if not (math.isfinite(budget) and budget > 0):
            raise MergeError(
                f"budgets[{client}] is {budget}; a budget is a positive number of bits per weight"
            )
        if count < 0:
            raise MergeError(f"samples[{client}] is {count}; a client holds 0 samples or more")
    shares = np.asarray(budgets, dtype=np.float64) * np.asarray(samples, dtype=np.float64)
    # fsum, so that one client's weight does not depend on the order of the others.
    total = math.fsum(shares)
    if total <= 0:
        raise MergeError("no client has any samples; a round needs at least one update trained on data")
    return shares / total


def average_bit_widths(
    weights: NDArray[np.float64], bit_widths: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """``b_l = floor(sum_n p_n b_n,l + 1/2)``, clamped to 1..8: an exact half rounds up."""
    if len(weights) != len(bit_widths) or len(bit_widths) == 0:
        raise MergeError(
            f"{len(weights)} weights but {len(bit_widths)} bit-width vectors; give one of each per client"
        )
    total = math.fsum(weights)
    if not abs(total - 1) < 1e-6:
        raise MergeError(f"the weights sum to {total}; they must sum to 1 (see participation_weights)")
    for client, widths in enumerate(bit_widths):
        if len(widths) != len(bit_widths[0]):
            raise MergeError(
                f"bit_widths[{client}] has {len(widths)} layers but bit_widths[0] has {len(bit_widths[0])}; "
                "all clients of a run train the same graph"
            )
    columns = np.asarray(bit_widths, dtype=np.float64).T
    means = [math.fsum(weights * column) for column in columns]
    return tuple(min(max(math.floor(mean + 0.5 + _HALF_TOLERANCE), MIN_BITS), MAX_BITS) for mean in means)


class WeightedSum:
    """``sum_n weight_n * T_n`` for every named tensor ``T`` of a model, in float64, and ``sum_n weight_n``.

    The first ``add`` fixes the names and shapes. An ``add`` that raises leaves the sum as it was.
    """

    def __init__(self) -> None:
        self._sums: dict[str, NDArray[np.float64]] = {}
        self._weight = 0.0
        self._count = 0

    @property
    def count(self) -> int:
        """How many updates have been added."""
        return self._count

    def add(self, weight: float, tensors: Mapping[str, NDArray[np.float32]]) -> None:
        """Add one client's tensors. Called in the order of client ids, the result repeats to the bit."""
        if not (math.isfinite(weight) and weight >= 0):
            raise MergeError(f"the weight of an update is {weight}; it must be finite and not negative")
        for name, tensor in tensors.items():
            _require_float32(name, tensor)
        if self._count == 0:
            self._sums = {name: np.zeros(tensor.shape, np.float64) for name, tensor in tensors.items()}
        _require_same_layout(tensors, self._sums)
        for name, total in self._sums.items():
            total += np.multiply(tensors[name], weight, dtype=np.float64)
        self._weight += weight
        self._count += 1

    def mean(self) -> dict[str, NDArray[np.float32]]:
        """``sum_n weight_n * T_n / sum_n weight_n``, rounded once to float32. The sum may go on after it."""
        if self._weight <= 0:
            raise MergeError(
                f"the {self._count} updates added weigh {self._weight} in total; nothing to divide by"
            )
        # asarray, because dividing a tensor of shape () gives a scalar.
        return {name: np.asarray(total / self._weight, np.float32) for name, total in self._sums.items()}


def merge_models(models: WeightedSum) -> dict[str, NDArray[np.float32]]:
    """The paper's merge: ``W <- sum_n p_n W_n``. The sum holds the clients' whole models ``W_n``."""
    return models.mean()


def merge_deltas(
    weights: Mapping[str, NDArray[np.float32]], deltas: WeightedSum
) -> dict[str, NDArray[np.float32]]:
    """The merge that keeps what no client touched: ``W <- W + sum_n p_n (W_n - G_n)``.

    The sum holds, per client, what it returned less the quantized model ``G_n`` it was sent.
    """
    moves = deltas.mean()
    _require_same_layout(moves, weights)
    with np.errstate(over="ignore"):
        merged = {name: np.asarray(weights[name] + move, np.float32) for name, move in moves.items()}
    for name, tensor in merged.items():
        _require_float32(name, tensor)
    return merged


def moved_by(
    weights: Mapping[str, NDArray[np.float32]], sums: Mapping[str, NDArray[np.float64]], total: int
) -> dict[str, NDArray[np.float32]]:
    """``W + sum / total`` of every tensor in float64, rounded once to float32; sums are flat, in C order."""
    if total <= 0:
        raise MergeError("the updates weigh nothing in total; nothing to divide by")
    merged = {}
    for name, change in sums.items():
        with np.errstate(over="ignore"):
            moved = weights[name] + (change / total).reshape(weights[name].shape)
            merged[name] = np.asarray(moved, np.float32)
        _require_float32(name, merged[name])
    return merged


def moving_share(averaging: float, rounds: int) -> float:
    """The share of round `t` = `rounds` in an average over the rounds so far.

    Below 1 `averaging` is a decay `d`: the average is `sum_k d^k W_(t-k) / sum_k d^k`, and the share
    ``(1 - d) / (1 - d^t)``, from 1 in the first round down to ``1 - d``.

    From 1 on it is a power `p`: the share ``(p + 1) / (t + p)`` weighs the model of round `k` by
    ``k (k + 1) ... (k + p - 1)``, about ``k^p`` (Shamir and Zhang, 2013), so that the average is of the last
    ``1 / (p + 1)`` of the rounds or so, however many there are.
    """
    if averaging >= 1:
        return (averaging + 1) / (rounds + averaging)
    return (1 - averaging) / (1 - averaging**rounds)


def moved_towards(
    average: Mapping[str, NDArray[np.float32]], newest: Mapping[str, NDArray[np.float32]], share: float
) -> dict[str, NDArray[np.float32]]:
    """``A + share * (T - A)`` of every tensor, in float64, rounded once to float32."""
    _require_same_layout(newest, average)
    return {
        name: np.asarray(old + share * (newest[name].astype(np.float64) - old), np.float32)
        for name, old in average.items()
    }


def next_average(model: GlobalModel, weights: Weights, side: Side, averaging: float) -> Average | None:
    """The moving average after the round that made `weights` and `side` of `model`."""
    if not averaging:
        return None
    if model.average is None:
        return Average(weights, side)
    old, share = model.average, moving_share(averaging, model.round + 1)
    return Average(moved_towards(old.weights, weights, share), moved_towards(old.side, side, share))


def _require_float32(name: str, tensor: NDArray[np.float32]) -> None:
    if tensor.dtype != np.float32:
        raise MergeError(f"tensor {name!r} is {tensor.dtype}; updates are merged from float32")
    if not np.isfinite(tensor).all():
        raise MergeError(
            f"tensor {name!r} holds a NaN or an infinity; discard this update, its training diverged"
        )


def _require_same_layout(
    tensors: Mapping[str, NDArray[np.float32]],
    expected: Mapping[str, NDArray[np.float32]] | Mapping[str, NDArray[np.float64]],
) -> None:
    for name in sorted(tensors.keys() ^ expected.keys()):
        where = "missing from this update" if name in expected else "unknown to this round"
        raise MergeError(f"tensor {name!r} is {where}; every update carries the same tensors")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            raise MergeError(
                f"tensor {name!r} has shape {tensor.shape}; this round merges {expected[name].shape}"
            )
