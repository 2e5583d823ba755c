"""One model into one verified file, with a card beside it that says what it is.

A file gets its name only after it has passed: what does not do what the integer reference does is deleted.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmpq.export.card import Card, card_path, describe
from fedmpq.export.float_speed import SpeedMeter
from fedmpq.export.format import ExportError
from fedmpq.export.target import Images, Runner, Target
from fedmpq.export.targets import find_target, target_of
from fedmpq.export.verify import random_images
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.metrics import METRICS, score_of
from fedmpq.system.durable_files import move_durably, write_durably

RANDOM_IMAGES = 16
REAL_IMAGES = 256
"""So many of each the runtime must agree on before a file is kept."""


@dataclass(frozen=True)
class LabelledImages:
    """Labelled pixels, for verification and the task's metric; `source` names them in errors."""

    images: Images
    labels: NDArray[np.int64]
    source: str = "the test set"
    targets: NDArray[np.float32] | None = None
    """In the place of labels, of a task whose answers are numbers."""
    anomalous: NDArray[np.bool_] | None = None
    """Which are not normal, of a model that reconstructs its input."""


@dataclass(frozen=True)
class Exported:
    """A file that is there, and what its card says."""

    path: Path
    card: Card


def export_model(
    model: DeployedModel,
    path: Path | str,
    *,
    target: Target | type[Target] | str | None = None,
    verify: bool = True,
    tests: LabelledImages | None = None,
    speed: SpeedMeter | None = None,
) -> Exported:
    """Write the model to `path`, and its card beside it.

    `target` is a target, its class, its name, or `package.module:Class`; by default it is the built-in one
    whose files end like `path`. Its own runtime must compute the integer reference's logits of random images
    and of `tests` before the file appears, unless `verify` is false. `tests` also measure how well it does,
    `speed` how fast it is.
    """
    path = Path(path)
    chosen = _target(path, target)
    model = _with_class_names(model)
    images = _images(model.graph, tests)
    content = chosen.lower(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{os.getpid()}-{path.name}")
    try:
        partial.write_bytes(content)
        if verify:
            chosen.verify(partial, model, images)
        card = describe(model, chosen, content)
        card["verified_images"] = len(images) if verify else 0
        card |= _measured(model.graph, None if tests is None else chosen.run(partial), tests)
        card["speed"] = None if speed is None else speed.measure(model, chosen, partial)
        # Its card comes first: a file that is there has passed and is described.
        text = json.dumps(card, indent=1, ensure_ascii=False) + "\n"
        write_durably(card_path(path), text.encode(), private=False)
        move_durably(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return Exported(path, card)


def _target(path: Path, given: Target | type[Target] | str | None) -> Target:
    if given is None:
        return target_of(path)
    target = find_target(given)
    if not path.name.endswith(target.suffix):
        raise ExportError(
            f"files of export target {target.name!r} end in {target.suffix}, and {path.name!r} does not;"
            f" call it {path.name}{target.suffix}"
        )
    return target


def _with_class_names(model: DeployedModel) -> DeployedModel:
    """The model with a name for each output: its number, where it has none."""
    if model.graph.task == "reconstruction":
        # Its outputs are those of its input; the run's names are of kinds of samples.
        return replace(model, class_names=())
    outputs = model.graph.shapes[model.graph.output][0]
    if not model.class_names:
        return replace(model, class_names=tuple(str(label) for label in range(outputs)))
    if len(model.class_names) != outputs:
        raise ExportError(
            f"{len(model.class_names)} class names for the {outputs} outputs of {model.graph.name!r}: they"
            " are of another graph"
        )
    return model


def _images(graph: Graph, tests: LabelledImages | None) -> Images:
    noise = random_images(graph, RANDOM_IMAGES)
    if tests is None:
        return noise
    if tests.images.shape[1:] != noise.shape[1:]:
        raise ExportError(
            f"the images of {tests.source} are {tests.images.shape[1:]}, and {graph.name!r} takes"
            f" {noise.shape[1:]}: they are not what it was trained on"
        )
    return np.concatenate([noise, tests.images[:REAL_IMAGES]])


def _measured(graph: Graph, runner: Runner | None, tests: LabelledImages | None) -> Card:
    """The task's metric by its name, None without tests, and others beside it."""
    key = METRICS[graph.task].key
    if runner is None or tests is None:
        return {"metric": key, key: None}
    given = tests.labels if tests.targets is None else tests.targets
    score = score_of(graph, runner.logits(tests.images), tests.images, given, tests.anomalous)
    return {"metric": key, key: score.value, **score.others}
