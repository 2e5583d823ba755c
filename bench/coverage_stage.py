"""One network through one stage: `python -m bench.coverage_stage NAME SIZE STAGE` prints a JSON object.

A network that is refused, or a file that its runtime computes otherwise, is told as `{"error": words}`.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import torch_rivals
from bench.classifiers import CLASSIFIERS, module_of, workload_of
from bench.inference import scattered
from bench.timing import load_average
from bench.train_step import paired
from bench.workload import Workload, engine_trainer
from fedmpq.exchange.messages import TrainingPlan
from fedmpq.export.exporting import export_model
from fedmpq.export.float_network import normalised
from fedmpq.export.speed import Job, latencies, speed_up
from fedmpq.export.target import Target
from fedmpq.export.targets import TARGETS
from fedmpq.export.verify import random_images
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import Engine
from fedmpq.training.native_engine import NativeEngine
from fedmpq.training.torch_engine import TorchEngine

BATCH = 16
REPETITIONS = 3
INFERENCE_SECONDS = 2.0

Facts = dict[str, Any]


def train(name: str, size: int) -> Facts:
    """Losses of the first step on both engines, and the native one's speed against torch fp32."""
    module = module_of(name)
    work = workload_of(name, module, size, BATCH)
    native, reference = (first_loss(engine, work) for engine in (NativeEngine(1), TorchEngine()))
    if not (math.isfinite(native) and math.isfinite(reference)):
        raise ValueError(f"the first step's loss is {native} on the native engine, {reference} on torch's")
    fp32 = torch_rivals.trainer(
        module.to(memory_format=torch.channels_last).train(),  # type: ignore[call-overload]
        torch_rivals.float_batches(work),
    )
    trainers = {"native": engine_trainer(NativeEngine(1), work, "paper"), "torch_fp32": fp32}
    timings = paired(trainers, REPETITIONS)
    return {
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "layers": len(work.graph.layers),
        "native_loss": native,
        "torch_loss": reference,
        "native_seconds": timings.time("native").median,
        "speedup": timings.ratio("torch_fp32", "native").median,
    }


def first_loss(engine: Engine, work: Workload) -> float:
    """The loss of the first batch, before it has changed anything, from a step that changes what it can."""
    plan = TrainingPlan(update="carried", learning_rate=0.01, code_learning_rate=0.05)
    engine.load(work.graph, work.layers, work.side, plan, Draws(seed=0, client=0, round=1))
    return engine.train_epoch(work.batches[:1]).loss


def export(target: Target, name: str, size: int) -> Facts:
    """Bytes of a file that its runtime computes to the bit, and its speed against torch fp32."""
    module = module_of(name).eval()
    work = workload_of(name, module, size, 1)
    classes = tuple(str(label) for label in range(work.graph.shapes[work.graph.output][0]))
    model = DeployedModel(work.graph, work.layers, scattered(work.side), classes)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        exported = export_model(model, Path(folder) / f"{name}{target.suffix}", target=target)
        seconds = time.perf_counter() - start
        speedup = inference_speedup(model, module, target, exported.path)
    return {
        "file_bytes": exported.card["file_bytes"],
        "verified_images": exported.card["verified_images"],
        "export_seconds": round(seconds, 1),
        "speedup": speedup,
    }


def inference_speedup(model: DeployedModel, module: torch.nn.Module, target: Target, path: Path) -> float:
    """One image at a time on one thread; torch's is a float already."""
    pixels = random_images(model.graph, 2)[:1]
    image = torch.from_numpy(normalised(model.graph, pixels)).contiguous(memory_format=torch.channels_last)
    module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    runner = target.run(path)

    def fp32() -> None:
        with torch.inference_mode():
            module(image)

    jobs: dict[str, Job] = {"file": lambda: runner.logits(pixels), "torch_fp32": fp32}
    return speed_up(latencies(jobs, INFERENCE_SECONDS), "file", "torch_fp32")


STAGES: dict[str, Callable[[str, int], Facts]] = {
    "train": train,
    "onnx": lambda name, size: export(TARGETS["onnx"], name, size),
    "executorch": lambda name, size: export(TARGETS["executorch"], name, size),
}


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.coverage_stage", description=__doc__)
    parser.add_argument("name", choices=CLASSIFIERS)
    parser.add_argument("size", type=int)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--memory-gb", type=float, default=12.0, help="ends above (default %(default)s)")
    arguments = parser.parse_args()
    limit = int(arguments.memory_gb * 1e9)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    try:
        facts = STAGES[arguments.stage](arguments.name, arguments.size)
    # Whatever stands in a network's way is what the table is there to tell.
    except Exception as error:
        facts = {"error": _one_line(error)}
    print(json.dumps({**facts, "load_average": load_average()[0]}))


if __name__ == "__main__":
    main()
