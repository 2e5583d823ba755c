"""An exported ExecuTorch program against the integer reference, through ExecuTorch's own runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedmpq.export.executorch.last_layer import with_bias
from fedmpq.export.executorch.lowering import lower_to_executorch, stored_zero
from fedmpq.export.executorch.runtime import ExecuTorchRunner
from fedmpq.export.format import MAX_BATCH
from fedmpq.export.operations import RealLayer, operations
from fedmpq.export.target import Images
from fedmpq.export.verify import Values, channels_last, require_logits
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import INPUT
from fedmpq.model.grid import integer_weights

LOGIT_TOLERANCE = 1e-5
"""Relative to the greatest logit, where the last layer adds in float32."""


def tolerance(model: DeployedModel) -> float:
    """None at all if the logits are sums of integers."""
    formats, output = model.program.formats, model.program.output
    for step in operations(model.program, model.layers):
        if step.output == output and isinstance(step, RealLayer):
            weight = integer_weights(step.sums.codes, step.sums.bits)
            if with_bias(weight, step.sums.bias, formats[step.sums.source]) is not None:
                return 0.0
    return LOGIT_TOLERANCE


def verify(path: Path, model: DeployedModel, images: Images) -> None:
    """Equal logits, but for the sums of a last layer in float32."""
    got = ExecuTorchRunner(path).logits(images)
    require_logits(
        "ExecuTorch",
        model,
        images,
        got,
        tolerance=tolerance(model),
        values=lambda some: values(model, some),
    )


def values(model: DeployedModel, images: Images) -> Values:
    """The codes of every value as XNNPACK computes them, of at most 64 images."""
    formats = model.program.formats
    wanted = [name for name in formats if name != INPUT]
    runner = ExecuTorchRunner(lower_to_executorch(model.program, model.layers, wanted))
    found = runner.outputs(images[:MAX_BATCH])
    return {
        name: channels_last(codes.astype(np.int32) - stored_zero(formats[name]))
        for name, codes in zip(wanted, found, strict=True)
    }
