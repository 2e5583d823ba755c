"""The losses of outputs that are compared with numbers, bound to their memory (see `bound`)."""

from __future__ import annotations

from functools import partial

from fedmpq.kernels.call import Call, CheckedCall, Elements
from fedmpq.kernels.memory import Memory


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


sigmoid_loss = partial(_loss, "fedmpq_sigmoid_loss")
"""Targets are 0 or 1 for each label. Gives the number of right labels."""
squared_loss = partial(_loss, "fedmpq_squared_loss")
"""Targets are a number for each output. Gives 0."""
