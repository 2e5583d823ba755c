"""Post-training quantization: a network that was trained elsewhere, given bits under a budget.

No training takes place. Clips are those of least squared error on the activations that calibration images
cause, bits are dealt where they remove the most error, and BatchNorm's statistics are measured for the
quantized weights by the integer forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmpq.method.recipe import Recipe
from fedmpq.method.round_quantizer import RoundQuantizer
from fedmpq.model.activations import code_bounds
from fedmpq.model.calibration import MIN_SAMPLES, measure, statistics_names
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.float_forward import float_values
from fedmpq.model.graph import Graph, Node, Quantize
from fedmpq.model.quantized import Side, Weights

Images = NDArray[np.uint8]

CALIBRATION_BATCH = 64
CLIP_IMAGES = 256
"""Images on which clips are chosen; the histograms of a few hundred tell no more."""
CANDIDATES = 64
"""Clips tried for each quantizer, from a twentieth of the greatest value up to it."""
BINS = 2048
STATISTICS_IMAGES = 2048


class QuantizeError(ValueError):
    """A network or images that cannot be quantized as asked."""


@dataclass(frozen=True)
class FloatModel:
    """A trained network: its graph, with quantizers placed, and its tensors."""

    graph: Graph
    weights: Weights
    side: Side


def quantize_model(
    trained: FloatModel, budget: float, images: Images, class_names: tuple[str, ...] = ()
) -> DeployedModel:
    """The network with at most `budget` bits per weight on average, as an integer model."""
    _check_images(trained.graph, images)
    graph = trained.graph
    side = trained.side | fitted_clips(graph, trained.weights, trained.side, images[:CLIP_IMAGES])
    recipe = Recipe("least_error", "least_error", "deltas", per_channel=True)
    quantizer = RoundQuantizer(graph, trained.weights, side, recipe)
    layers = quantizer.layers(quantizer.dealt(budget))
    if statistics_names(graph):
        side = side | measure(graph, layers, side, _batches(images[:STATISTICS_IMAGES]))
    return DeployedModel(graph, layers, side, class_names, {"budget": budget})


def fitted_clips(graph: Graph, weights: Weights, side: Side, images: Images) -> Side:
    """For each quantizer the clip with the least squared error on what these images make it read."""
    ranges: dict[str, float] = {}
    for node, value in _quantized_values(graph, weights, side, images):
        ranges[node.name] = max(ranges.get(node.name, 0.0), float(np.abs(value).max(initial=0.0)))
    counts = {name: np.zeros(BINS) for name in ranges}
    for node, value in _quantized_values(graph, weights, side, images):
        found, _ = np.histogram(np.abs(value), bins=BINS, range=(0.0, ranges[node.name] or 1.0))
        counts[node.name] += found
    clips: Side = {}
    for node in graph.nodes:
        if isinstance(node.op, Quantize):
            clip = _best_clip(counts[node.name], ranges[node.name] or 1.0, node.op)
            clips[f"{node.name}.clip"] = np.array(clip, np.float32)
    return clips


def _quantized_values(
    graph: Graph, weights: Weights, side: Side, images: Images
) -> Iterator[tuple[Node, NDArray[np.float32]]]:
    for batch in _batches(images):
        for node, value in float_values(graph, weights, side, batch):
            if isinstance(node.op, Quantize):
                yield node, value


def _best_clip(counts: NDArray[np.float64], greatest: float, op: Quantize) -> float:
    """The clip of least squared error, where a magnitude `x` becomes `scale * rint(min(x, clip) / scale)`."""
    _, high = code_bounds(op.bits, op.signed)
    centres = (np.arange(BINS) + 0.5) * (greatest / BINS)
    clips = np.geomspace(0.05, 1.0, CANDIDATES) * greatest
    scales = (clips / high)[:, None]
    rounded = np.minimum(np.rint(centres / scales), high) * scales
    errors = (np.square(rounded - centres) * counts).sum(axis=1)
    return float(clips[int(errors.argmin())])


def _batches(images: Images) -> Iterator[Images]:
    for start in range(0, len(images), CALIBRATION_BATCH):
        batch = images[start : start + CALIBRATION_BATCH]
        if len(batch) >= MIN_SAMPLES:
            yield batch


def _check_images(graph: Graph, images: Images) -> None:
    expected = graph.input.height, graph.input.width, graph.input.channels
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != expected:
        raise QuantizeError(
            f"the calibration images are {images.dtype} of shape {images.shape}; the network takes uint8 of "
            f"shape (N, {', '.join(map(str, expected))})"
        )
    if len(images) < MIN_SAMPLES:
        raise QuantizeError(f"{len(images)} calibration images are too few; give some hundreds")
