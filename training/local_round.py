"""One client's share of a round: take the assignment, train the codes, prune, give the update."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.change import change_of
from fedmpq.exchange.messages import (
    Assignment,
    TrainingPlan,
    Update,
    pack_layers,
    rounded_side,
    unpack_layers,
)
from fedmpq.model.calibration import MIN_SAMPLES
from fedmpq.model.graph import Graph
from fedmpq.model.pruning import prune_msb
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.randomness import Draws, Purpose
from fedmpq.training.augment import epoch_order, pad_crop_flip
from fedmpq.training.engine import Batch, Engine, EpochResult, TrainingError
from fedmpq.training.label_prior import logit_shift

Progress = Callable[[int, EpochResult], None]


def run_local_round(
    engine: Engine, graph: Graph, assignment: Assignment, data: Dataset, progress: Progress | None = None
) -> Update:
    """Train `assignment` on `data` with `engine`; `progress` hears of every epoch."""
    check_data(graph, data, assignment.client)
    plan = assignment.plan
    draws = Draws(assignment.seed, assignment.client, assignment.round)
    shift = logit_shift(graph, plan, data.labels)
    engine.load(graph, unpack_layers(graph, assignment.layers), assignment.side, plan, draws, shift)
    result = EpochResult(0, 0.0, 0.0)
    for epoch in range(plan.epochs):
        result = engine.train_epoch(batches(data, plan, draws, epoch, graph.input.zero_point))
        if progress is not None:
            progress(epoch, result)
    side = engine.side()
    require_finite(side, plan)
    return Update(
        round=assignment.round,
        client=assignment.client,
        samples=len(data),
        layers=pack_layers(_returned(engine, unpack_layers(graph, assignment.layers), plan)),
        side=rounded_side(side, plan.side_bits),
        loss=result.loss,
        accuracy=result.accuracy,
    )


def require_finite(tensors: Side, plan: TrainingPlan) -> None:
    """Refuse a trained model with NaN or infinity in it: no loss follows the last step that would show it."""
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise TrainingError(
                f"{name} is not finite after training; lower the learning rate (now {plan.learning_rate})"
            )


def batches(data: Dataset, plan: TrainingPlan, draws: Draws, epoch: int, fill: int) -> Iterator[Batch]:
    """The samples in this epoch's order, augmented; a last batch of a single sample is left out."""
    order = epoch_order(len(data), draws.uniform(len(data), Purpose.ORDER, step=epoch))
    answers = data.labels if data.targets is None else data.targets
    shifts = draws.uniform(3 * len(data), Purpose.AUGMENT, step=epoch).reshape(-1, 3)
    for start in range(0, len(order), plan.batch_size):
        chosen = order[start : start + plan.batch_size]
        if len(chosen) < MIN_SAMPLES:
            return
        images = data.images[chosen]
        if plan.pad or plan.flip:
            images = pad_crop_flip(images, shifts[chosen], plan.pad, fill, plan.flip)
        yield np.ascontiguousarray(images), answers[chosen]


def check_data(graph: Graph, data: Dataset, client: int) -> None:
    """Refuse data that the model cannot read, or too little."""
    if len(data) < MIN_SAMPLES:
        raise TrainingError(
            f"client {client} has {len(data)} samples; local training needs at least {MIN_SAMPLES}"
        )
    image, outputs = graph.input, graph.shapes[graph.output][0]
    expected = (image.height, image.width, image.channels)
    if data.image_shape != expected:
        raise TrainingError(
            f"client {client} has images of {data.image_shape} (height, width, channels), the model takes"
            f" {expected}; load them at that size and colour mode"
        )
    if graph.task == "classification":
        if (greatest := int(data.labels.max())) >= outputs:
            raise TrainingError(
                f"client {client} has label {greatest}, the model's {outputs} classes end at {outputs - 1};"
                " number the labels as the model's classes are"
            )
    elif graph.task != "reconstruction" and (data.targets is None or data.targets.shape[1] != outputs):
        found = "no" if data.targets is None else str(data.targets.shape[1])
        raise TrainingError(
            f"client {client} has {found} targets a sample, the model {outputs} outputs for {graph.task};"
            " give a target for each output"
        )


def _returned(engine: Engine, sent: Layers, plan: TrainingPlan) -> Layers:
    """The trained model, pruned, or under the carried rule what it has changed by."""
    if plan.update == "paper":
        return _pruned(engine.layers(), plan.prune_density)
    fractions = engine.fractions()
    return {name: change_of(sent[name], layer, fractions[name]) for name, layer in engine.layers().items()}


def _pruned(layers: Layers, density: float | None) -> Layers:
    if density is None:
        return layers
    pruned: Layers = {}
    for name, layer in layers.items():
        codes, bits = prune_msb(layer.codes, layer.bits, density)
        pruned[name] = QuantizedLayer(codes, bits, layer.step)
    return pruned
