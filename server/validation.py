"""Whether an update or a calibration is what its assignment asked for. Nothing a client says is believed.

`exchange.wire` has checked the form by then; here it is compared with what was sent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.exchange.change import MAX_CHANGE_STEP, change_in_weights
from fedmpq.exchange.messages import Calibration, Evaluation, Update, UpdateRule, unpack_layers
from fedmpq.exchange.wire import WireError, decode_calibration, decode_update
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Layers, QuantizedLayer, Side

SIDE_FACTOR = 10.0
"""Scales and biases move more freely than weights: in the first rounds of a run by about their norm."""
STATISTICS_FACTOR = 4.0
"""How much larger running means, and the roots of running variances, may be than the sent weights allow: the
weights move while they are gathered."""
CLIP_FACTOR = 16.0
"""A clip moves within a round by less than half; beyond this it is no clip of these activations."""

MAX_LOSS = 1e6


class Rejected(ValueError):
    """An update or a calibration that is not merged; the reason goes to its sender and to the log."""


@dataclass(frozen=True)
class Expected:
    """What the assignment fixes about the update or calibration that answers it."""

    run_id: str
    round: int
    client: int
    layers: Layers
    """As sent."""
    side: Side
    max_samples: int
    max_norm: float
    """The weights may move by this many times their norm."""
    bounds: Mapping[str, NDArray[np.float64]]
    """How large each BatchNorm statistic of the model that was sent can be."""
    update: UpdateRule = "paper"
    """Under "paper" a client returns its model, under "carried" what it has changed by."""


def check_update(graph: Graph, data: bytes, expected: Expected) -> Update:
    """The update in `data`, or Rejected."""
    try:
        run_id, update = decode_update(graph, data)
    except WireError as error:
        raise Rejected(str(error)) from None
    _check_address(run_id, update, expected)
    if not 1 <= update.samples <= expected.max_samples:
        raise Rejected(
            f"it says it trained on {update.samples} samples; the client may say 1..{expected.max_samples}"
        )
    _check_evaluation(update.evaluation, expected)
    if not 0 <= update.loss <= MAX_LOSS:
        raise Rejected(f"it reports a loss of {update.loss:g}; 0..{MAX_LOSS:g} is plausible")
    returned = unpack_layers(graph, update.layers)
    check_layer = _check_change if expected.update == "carried" else _check_layer
    for name, layer in returned.items():
        check_layer(name, layer, expected.layers[name])
    _check_norm(returned, expected)
    for name, tensor in update.side.items():
        _check_side(name, tensor, expected)
    return update


def check_calibration(graph: Graph, data: bytes, expected: Expected) -> Calibration:
    """The calibration in `data`, or Rejected."""
    try:
        run_id, calibration = decode_calibration(graph, data)
    except WireError as error:
        raise Rejected(str(error)) from None
    _check_address(run_id, calibration, expected)
    if not 1 <= calibration.samples <= expected.max_samples:
        raise Rejected(
            f"it says it has {calibration.samples} samples; the client may say 1..{expected.max_samples}"
        )
    _check_evaluation(calibration.evaluation, expected)
    for name, tensor in calibration.statistics.items():
        _check_statistics(name, tensor, expected.bounds[name])
    return calibration


def _check_address(run_id: str, answer: Update | Calibration, expected: Expected) -> None:
    if run_id != expected.run_id:
        raise Rejected(f"it is of run {run_id!r}, not {expected.run_id!r}")
    if answer.round != expected.round:
        raise Rejected(f"it is of round {answer.round}, not {expected.round}")
    if answer.client != expected.client:
        raise Rejected(f"it is of client {answer.client}; its sender is {expected.client}")


def _check_evaluation(evaluation: Evaluation | None, expected: Expected) -> None:
    if evaluation is not None and evaluation.samples > expected.max_samples:
        raise Rejected(
            f"it evaluated {evaluation.samples} samples; the client may say {expected.max_samples}"
        )


def _check_statistics(name: str, tensor: NDArray[np.float32], bound: NDArray[np.float64]) -> None:
    excess = np.abs(tensor.astype(np.float64)) > bound
    if excess.any():
        channel = int(excess.argmax())
        raise Rejected(
            f"side tensor {name!r} has {float(tensor[channel]):.3g} in channel {channel}; "
            f"at most {bound[channel]:.3g} is possible with the model that was sent"
        )


def _check_layer(name: str, returned: QuantizedLayer, sent: QuantizedLayer) -> None:
    if returned.bits > sent.bits:
        raise Rejected(f"layer {name!r} came back with {returned.bits} bits; it was dealt {sent.bits}")
    if returned.step.shape != sent.step.shape or returned.step.tobytes() != sent.step.tobytes():
        raise Rejected(f"layer {name!r} came back with other steps than it was sent with")


def _check_change(name: str, change: QuantizedLayer, sent: QuantizedLayer) -> None:
    if change.bits != sent.bits:
        raise Rejected(f"the change of layer {name!r} has {change.bits} bits; it was dealt {sent.bits}")
    step = change.step
    if step.shape != sent.step.shape:
        raise Rejected(f"the change of layer {name!r} has {step.size} steps; it was sent {sent.step.size}")
    if not ((step == np.rint(step)) & (step >= 1) & (step <= MAX_CHANGE_STEP)).all():
        raise Rejected(
            f"the change of layer {name!r} has a step that is no whole number in 1..{MAX_CHANGE_STEP}"
        )


def _check_norm(returned: Layers, expected: Expected) -> None:
    """`|W_n - G_n| <= max_norm * |G_n|` over all layers, one at a time to spare memory."""
    moved = size = 0.0
    for name, sent in expected.layers.items():
        weights = sent.weights()
        size += _power(weights)
        if expected.update == "carried":
            moved += _power(change_in_weights(returned[name], sent))
        else:
            moved += _power(returned[name].weights() - weights)
    if moved > expected.max_norm**2 * size:
        ratio = math.sqrt(moved / size) if size else math.inf
        raise Rejected(
            f"it moves the weights by {ratio:.3g} times their norm; max_update_norm is {expected.max_norm:g}"
        )


def _check_side(name: str, returned: NDArray[np.float32], expected: Expected) -> None:
    sent = expected.side[name]
    if name.endswith(".running_var") and (returned < 0).any():
        raise Rejected(f"side tensor {name!r} holds a negative variance")
    if name in expected.bounds:
        factor = STATISTICS_FACTOR if name.endswith(".running_mean") else STATISTICS_FACTOR**2
        # What was sent may be larger, for it was gathered with other weights.
        _check_statistics(name, returned, np.maximum(factor * expected.bounds[name], np.abs(sent)))
    elif name.endswith(".clip"):
        _check_clip(name, float(returned), float(sent))
    else:
        _check_move(name, returned, sent, expected.max_norm)


def _check_clip(name: str, returned: float, sent: float) -> None:
    if not returned > 0:
        raise Rejected(f"side tensor {name!r} is a clip of {returned:g}; clips are positive")
    if not sent / CLIP_FACTOR <= returned <= sent * CLIP_FACTOR:
        raise Rejected(
            f"side tensor {name!r} is a clip of {returned:.3g}; it was sent as {sent:.3g} and may change by "
            f"a factor of {CLIP_FACTOR:g}"
        )


def _check_move(name: str, returned: NDArray[np.float32], sent: NDArray[np.float32], max_norm: float) -> None:
    moved = math.sqrt(_power(returned.astype(np.float64) - sent))
    allowed = SIDE_FACTOR * max_norm * (math.sqrt(_power(sent)) + math.sqrt(sent.size))
    if moved > allowed:
        raise Rejected(f"side tensor {name!r} moves by {moved:.3g}; at most {allowed:.3g} is plausible")


def _power(tensor: NDArray[np.floating]) -> float:
    return float(np.square(tensor, dtype=np.float64).sum())
