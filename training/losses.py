"""The loss of each task as a kernel's call, bound to a batch (`model.task` states the formulas)."""

from __future__ import annotations

import numpy as np

from fedmpq.kernels import bound, bound_losses
from fedmpq.kernels.call import Call
from fedmpq.kernels.memory import Buffer, Memory
from fedmpq.model.graph import Graph
from fedmpq.model.never import assert_never
from fedmpq.model.task import Task


def answer_buffer(graph: Graph, images: int) -> Buffer:
    """Room for what a batch's outputs are compared with: labels, or a number for each output."""
    if graph.task == "classification":
        return Buffer(images, np.int64)
    return Buffer(images * graph.shapes[graph.output][0], np.float32)


def bind_loss(
    task: Task,
    acc: Memory,
    samples: int,
    outputs: int,
    scale: Memory,
    bias: Memory,
    shift: Memory,
    answers: Memory,
    gradient: Memory,
    loss: Memory,
) -> Call:
    """Loss and gradient of outputs `acc * scale + bias`, of classes with `shift` added to their logits. Gives
    the number of right answers (`answers_each`), 0 where answers are no more than near."""
    arguments = (acc, samples, outputs, scale, bias, answers, gradient, loss)
    if task == "classification":
        return bound.softmax_loss(acc, samples, outputs, scale, bias, shift, answers, gradient, loss)
    if task == "multi_label":
        return bound_losses.sigmoid_loss(*arguments)
    if task == "regression" or task == "reconstruction":
        return bound_losses.squared_loss(*arguments)
    assert_never(task)


def answers_each(graph: Graph) -> int:
    """How many answers of a sample can be right: one of a class, one for each label."""
    return graph.shapes[graph.output][0] if graph.task == "multi_label" else 1
