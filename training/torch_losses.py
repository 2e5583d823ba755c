"""The loss of each task in torch: of outputs and what they are compared with (`model.task`)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedmpq.model.never import assert_never
from fedmpq.model.task import Task


def loss_of(task: Task, outputs: Tensor, answers: Tensor) -> Tensor:
    """The mean loss of a batch, to be differentiated by torch."""
    if task == "classification":
        return functional.cross_entropy(outputs, answers)
    if task == "multi_label":
        return functional.binary_cross_entropy_with_logits(outputs, answers)
    if task == "regression" or task == "reconstruction":
        return functional.mse_loss(outputs, answers)
    assert_never(task)


def shifted(task: Task, outputs: Tensor, shift: Tensor | None) -> Tensor:
    """The outputs as the loss takes them: `shift` is added to the logits of classes (`label_prior`)."""
    return outputs if shift is None or task != "classification" else outputs + shift


def judged(task: Task, outputs: Tensor, answers: Tensor) -> tuple[float, int, Tensor]:
    """Mean loss, number of right answers, and the loss's gradient by output."""
    if task == "classification":
        return cross_entropy(outputs, answers)
    loss = float(loss_of(task, outputs, answers))
    if task == "multi_label":
        right = int(((outputs > 0) == (answers > 0.5)).sum())
        return loss, right, (outputs.sigmoid() - answers) / outputs.numel()
    return loss, 0, 2 * (outputs - answers) / outputs.numel()


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[float, int, Tensor]:
    """Mean loss, number of right answers, and the gradient `(softmax - one hot)/N`."""
    log_shares = functional.log_softmax(logits, dim=1)
    loss = float(functional.nll_loss(log_shares, labels))
    right = int((logits.argmax(dim=1) == labels).sum())
    gradient = log_shares.exp()
    gradient[torch.arange(len(labels)), labels] -= 1
    return loss, right, gradient / len(labels)
