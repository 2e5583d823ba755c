"""How fast an exported file is beside the same network in fp32, taking turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedmpq.export.float_network import float_network, normalised
from fedmpq.export.onnx.target import OnnxTarget
from fedmpq.export.speed import Job, latencies, speed_up
from fedmpq.export.target import FloatRun, Reals, Target
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.quantized import dequantize_all

SECONDS = 1.0
# No runtime has an empty name.
_FILE = ""


class SpeedMeter:
    """Measures files one after the other.

    The fp32 twin of a graph is made once for each runtime: lowering it can take seconds, and for its speed
    the weights of one model are as good as another's.
    """

    def __init__(self) -> None:
        self._twins: dict[tuple[str, str], FloatRun] = {}

    def measure(self, model: DeployedModel, target: Target, path: Path) -> dict[str, float]:
        """One image at a time on one thread, against fp32 in ONNX Runtime and in the file's own runtime."""
        image = model.graph.input
        pixels = np.zeros((1, image.height, image.width, image.channels), np.uint8)
        real, runner = normalised(model.graph, pixels), target.run(path)
        twins = {each.runtime: self._twin(model, each) for each in (OnnxTarget(), target)}
        jobs: dict[str, Job] = {_FILE: lambda: runner.logits(pixels)}
        for runtime, twin in twins.items():
            jobs[runtime] = _job(twin, real)
        taken = latencies(jobs, SECONDS)
        speed = {"milliseconds": _milliseconds(taken[_FILE])}
        for runtime in twins:
            speed[f"fp32_{runtime}_milliseconds"] = _milliseconds(taken[runtime])
            speed[f"speedup_over_fp32_{runtime}"] = round(speed_up(taken, _FILE, runtime), 3)
        speed["speedup"] = speed[f"speedup_over_fp32_{target.runtime}"]
        return speed

    def _twin(self, model: DeployedModel, target: Target) -> FloatRun:
        key = target.runtime, model.graph.id
        if key not in self._twins:
            network = float_network(model.graph, dequantize_all(model.layers), model.side)
            self._twins[key] = target.float_twin(network)
        return self._twins[key]


def _job(run: FloatRun, images: Reals) -> Job:
    return lambda: run(images)


def _milliseconds(times: Sequence[float]) -> float:
    return round(float(np.median(times)) * 1e3, 4)
