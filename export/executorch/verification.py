"""An exported ExecuTorch program against the integer reference, through ExecuTorch's own runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedmpq.export.executorch.lowering import lower_to_executorch, stored_zero
from fedmpq.export.executorch.runtime import ExecuTorchRunner
from fedmpq.export.format import MAX_BATCH
from fedmpq.export.target import Images
from fedmpq.export.verify import Values, channels_last, require_logits
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import INPUT

LOGIT_TOLERANCE = 1e-5
"""Relative to the greatest logit: the last layer adds in float32."""


def verify(path: Path, model: DeployedModel, images: Images) -> None:
    """Equal logits but for the last layer's float32 sums."""
    got = ExecuTorchRunner(path).logits(images)
    require_logits(
        "ExecuTorch",
        model,
        images,
        got,
        tolerance=LOGIT_TOLERANCE,
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
