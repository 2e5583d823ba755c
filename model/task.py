"""What a model is trained for: which loss its outputs have, and what they are compared with.

| task | an output is | compared with | loss, the mean over samples |
|---|---|---|---|
| classification | the logit of a class | the label, one of the classes | cross-entropy of the softmax |
| multi_label | the logit of a label | 0 or 1 for each label | mean over labels of the sigmoid's |
| regression | a value | as many numbers | mean over outputs of the squared error |
| reconstruction | a value of the input | the input itself | mean over outputs of the squared error |

A reconstruction has as many outputs as its input has values, channels first as torch flattens them; codes `a`
stand for `scale * (a - zero_point)`, and that is what is reconstructed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedmpq.model.graph import Graph

Task = Literal["classification", "multi_label", "regression", "reconstruction"]
TASKS: tuple[Task, ...] = get_args(Task)
"""In the order of their numbers on the wire."""
CLASSIFICATION: Task = "classification"

Answers = NDArray[Any]
"""What outputs are compared with: labels int64 (N,), or targets float32 (N, outputs)."""


def outputs_of(task: Task, names: int, image: tuple[int, int, int]) -> int:
    """How many outputs a network has: one for each class, label or value, or one for each value it is fed."""
    return math.prod(image) if task == "reconstruction" else names


def input_values(scale: float, zero_point: int, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What images (N, H, W, C) stand for, in the order of a reconstruction's outputs: (N, C * H * W)."""
    centred = codes.astype(np.float32) - np.float32(zero_point)
    centred *= np.float32(scale)
    return np.ascontiguousarray(centred.transpose(0, 3, 1, 2).reshape(len(codes), -1))


def answers_of(graph: Graph, images: NDArray[np.uint8], given: Answers) -> Answers:
    """What the outputs of a batch are compared with: what was given, or the images themselves."""
    if graph.task != "reconstruction":
        return given
    return input_values(graph.input.scale, graph.input.zero_point, images)


def sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The probability of each label: 1 / (1 + exp(-logit))."""
    powers = np.exp(-np.abs(logits))
    return np.where(logits < 0, powers, np.float32(1)) / (1 + powers)  # type: ignore[no-any-return]


def reconstruction_errors(outputs: NDArray[Any], values: NDArray[Any]) -> NDArray[np.float64]:
    """By sample, the mean squared difference of its reconstruction: what tells an anomaly."""
    apart = outputs.astype(np.float64) - values
    return np.square(apart).mean(axis=1)  # type: ignore[no-any-return]


def answer_problem(graph: Graph, samples: int, answers: Answers) -> str | None:
    """Why these are no answers to so many samples; None: they are."""
    outputs = graph.shapes[graph.output][0]
    if graph.task == CLASSIFICATION:
        if answers.dtype != np.int64 or answers.shape != (samples,):
            return (
                f"the labels of {samples} images are {answers.dtype} of shape {answers.shape};"
                " they must be int64, one each"
            )
        if samples and not 0 <= int(answers.min()) <= int(answers.max()) < outputs:
            return (
                f"labels run from {answers.min()} to {answers.max()}, the model's classes end at"
                f" {outputs - 1}; number the labels as the model's classes are"
            )
    elif answers.dtype != np.float32 or answers.shape != (samples, outputs):
        return (
            f"the targets of {samples} samples are {answers.dtype} of shape {answers.shape}; they must be"
            f" float32, {outputs} each"
        )
    return None
