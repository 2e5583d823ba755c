"""The target `executorch`. Loads torch and ExecuTorch only when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedmpq.export.target import Feeding, FloatRun, Images, Reals, Runner
from fedmpq.model.export_formats import SUFFIXES

if TYPE_CHECKING:
    # A board that only runs files loads nothing of what makes them.
    from fedmpq.export.float_network import FloatNetwork
    from fedmpq.model.deployed import DeployedModel


class ExecuTorchTarget:
    """ExecuTorch programs that XNNPACK runs as a whole, compressed by xz or, for stock loaders, not."""

    runtime = "executorch"
    feeding = Feeding("int8", "(N, channels, height, width)", "pixel - 128")

    def __init__(self, compressed: bool = True) -> None:
        self.compressed = compressed
        self.name = "executorch" if compressed else "executorch-uncompressed"
        self.suffix = SUFFIXES[self.name]

    def lower(self, model: DeployedModel) -> bytes:
        from fedmpq.export.executorch.lowering import compress, lower_to_executorch

        program = lower_to_executorch(model.program, model.layers)
        return compress(program) if self.compressed else program

    def run(self, path: Path, threads: int = 1) -> Runner:
        from fedmpq.export.executorch.runtime import ExecuTorchRunner

        return ExecuTorchRunner(path, threads)

    def verify(self, path: Path, model: DeployedModel, images: Images) -> None:
        from fedmpq.export.executorch.verification import verify

        verify(path, model, images)

    def float_twin(self, network: FloatNetwork) -> FloatRun:
        import torch

        from fedmpq.export.executorch.float_twin import lower_float
        from fedmpq.export.executorch.runtime import ExecuTorchRunner

        runner = ExecuTorchRunner(lower_float(network))

        def run(images: Reals) -> Reals:
            logits: Reals = runner.run(torch.from_numpy(images))[0].numpy()
            return logits

        return run
