"""The losses of outputs that are compared with numbers, bound to their memory (see `bound`)."""

from __future__ import annotations

from fedmpq.kernels.call import Call, CheckedCall, Elements
from fedmpq.kernels.memory import Memory


def sigmoid_loss(
    acc: Memory,
    samples: int,
    outputs: int,
    scale: Memory,
    bias: Memory,
    targets: Memory,
    gradient: Memory,
    loss: Memory,
) -> Call:
    """Targets are 0 or 1 for each label. Gives the number of right labels."""
    return _loss("fedmpq_sigmoid_loss", acc, samples, outputs, scale, bias, targets, gradient, loss)


def squared_loss(
    acc: Memory,
    samples: int,
    outputs: int,
    scale: Memory,
    bias: Memory,
    targets: Memory,
    gradient: Memory,
    loss: Memory,
) -> Call:
    """Targets are a number for each output. Gives 0."""
    return _loss("fedmpq_squared_loss", acc, samples, outputs, scale, bias, targets, gradient, loss)


def _loss(
    name: str,
    acc: Memory,
    samples: int,
    outputs: int,
    scale: Memory,
    bias: Memory,
    targets: Memory,
    gradient: Memory,
    loss: Memory,
) -> Call:
    whole = samples * outputs
    return CheckedCall(
        name,
        Elements(acc, whole),
        samples,
        outputs,
        Elements(scale, outputs),
        Elements(bias, outputs),
        Elements(targets, whole),
        Elements(gradient, whole),
        Elements(loss, 1),
    )
