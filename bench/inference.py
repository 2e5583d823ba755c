"""Exported models against the same network in fp32 and in ONNX Runtime's own static int8.

One thread, batches of 1 and 64, rivals taking turns. The fp32 model and the static int8 model get normalised
float images ready made, ExecuTorch its int8 ones, the exported ONNX model pixels. Weights are as initialised;
BatchNorm's statistics and factors and the activations' clips are drawn as they scatter in trained networks (a
few factors are negative), and bit-widths are what a server deals at the budget. MobileNetV2 and ResNet-18
have ImageNet's 1000 classes, the others 10.

Accuracies are of another model, one that is trained: of the simulation that --run names, or of a short one on
the embedded digits, all of whose clients have the budget. Exported is what a device with the budget runs; the
static int8 model is made of the run's full-precision weights and calibrated on 256 of its training images.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.machine import warn_if_busy
from bench.timing import interleaved, load_average
from bench.workload import quantized
from fedmpq.export.card import bare_bytes
from fedmpq.export.executorch.lowering import compress, lower_to_executorch
from fedmpq.export.executorch.runtime import ExecuTorchRunner, executorch_input
from fedmpq.export.executorch.verification import values as executorch_values
from fedmpq.export.float_network import float_network, normalised
from fedmpq.export.onnx.float_twin import lower_float
from fedmpq.export.onnx.lowering import lower_to_onnx
from fedmpq.export.onnx.runtime import OnnxRunner, float_session
from fedmpq.export.onnx.target import OnnxTarget
from fedmpq.export.verify import first_difference, random_images
from fedmpq.lab import simulation
from fedmpq.lab.checkpoint import Checkpoint, load_checkpoint
from fedmpq.lab.experiment import Experiment
from fedmpq.method.registry import integer_method
from fedmpq.method.state import ClientRecord
from fedmpq.model import zoo
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.graph import Graph
from fedmpq.model.quantized import Side, Weights, dequantize_all

BATCHES = (1, 64)
SIZES = {"digits_cnn": 8, "mobilenet_v2": 64, "resnet18": 64}
MANY_CLASSES = ("mobilenet_v2", "resnet18")
CALIBRATION_IMAGES = 32
COMPARED_IMAGES = 16
TURN_SECONDS = 0.15
TRAINED_MODEL, TRAINED_ROUNDS, TRAINED_CLIENTS, TRAINED_EPOCHS = "digits_cnn", 10, 4, 3
TRAINED_CALIBRATION_IMAGES = 256


@dataclass(frozen=True)
class Rivals:
    """The model exported, and what it is compared with."""

    model: DeployedModel
    onnx: bytes
    pte: bytes
    fp32: bytes
    static_int8: bytes


def make_model(name: str, bits: float) -> DeployedModel:
    torch.manual_seed(0)
    size, classes = SIZES.get(name, 32), 1000 if name in MANY_CLASSES else 10
    module = zoo.build(name, classes=classes, channels=3)
    graph, layers, side = quantized(module, name, (3, size, size), bits)
    return DeployedModel(graph, layers, scattered(side), tuple(str(i) for i in range(classes)))


def scattered(side: Side) -> Side:
    """BatchNorm as after training: each channel its own scale and offset."""
    random = np.random.default_rng(0)
    draws: dict[str, Callable[[NDArray[np.float32]], Any]] = {
        "running_var": lambda a: a * np.exp(random.normal(0, 0.5, a.shape)),
        "running_mean": lambda a: random.normal(0, 0.3, a.shape),
        "weight": lambda a: random.normal(1, 0.4, a.shape),
        "bias": lambda a: random.normal(0, 0.3, a.shape),
        "clip": lambda a: a * np.exp(random.normal(0, 0.1, a.shape)),
    }
    parts = {name: name.rsplit(".", 1)[1] for name in side}
    return {name: np.asarray(draws[parts[name]](tensor), np.float32) for name, tensor in side.items()}


def make_rivals(model: DeployedModel) -> Rivals:
    fp32, static_int8 = float_rivals(model)
    return Rivals(
        model=model,
        onnx=lower_to_onnx(model.program, model.layers, {"classes": model.class_names}).to_bytes(),
        pte=lower_to_executorch(model.program, model.layers),
        fp32=fp32,
        static_int8=static_int8,
    )


def fp32_onnx(graph: Graph, weights: Weights, side: Side) -> bytes:
    return lower_float(float_network(graph, weights, side)).SerializeToString()


def float_rivals(model: DeployedModel) -> tuple[bytes, bytes]:
    """The same network in fp32, and what ONNX Runtime quantizes that to."""
    fp32 = fp32_onnx(model.graph, dequantize_all(model.layers), model.side)
    images = random_images(model.graph, CALIBRATION_IMAGES, seed=1)
    return fp32, quantized_statically(fp32, normalised(model.graph, images))


def quantized_statically(fp32: bytes, images: NDArray[np.float32]) -> bytes:
    """ONNX Runtime's own quantization at its best: QDQ, per channel, calibrated."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches: Iterator[Mapping[str, Any]] = iter([{"image": images}])

        def get_next(self) -> Mapping[str, Any] | None:
            return next(self.batches, None)

    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        source.write_bytes(fp32)
        quantize_static(
            source,
            target,
            Reader(),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return target.read_bytes()


def measure(rivals: Rivals, batch: int, repetitions: int) -> dict[str, Any]:
    """Times of each, and how many times as fast as fp32 each is."""
    graph = rivals.model.graph
    pixels = random_images(graph, max(2, batch))[:batch]
    real = normalised(graph, pixels)
    stored = executorch_input(pixels)
    onnx, executorch = OnnxRunner(rivals.onnx), ExecuTorchRunner(rivals.pte)
    fp32, static = float_session(rivals.fp32), float_session(rivals.static_int8)
    jobs = {
        "fp32": lambda: fp32(real),
        "onnx": lambda: onnx.logits(pixels),
        "executorch": lambda: executorch.run(stored),
        "static_int8": lambda: static(real),
    }
    timings = interleaved(jobs, repetitions, TURN_SECONDS)
    speedups = {name: timings.ratio("fp32", name) for name in jobs if name != "fp32"}
    return {
        "batch": batch,
        "milliseconds": {name: round(timings.time(name).median * 1e3, 4) for name in jobs},
        "speedups": {name: spread.as_dict() for name, spread in speedups.items()},
        "onnx_ahead_of_static_int8": timings.ratio("static_int8", "onnx").as_dict(),
    }


def trained(bits: float, run: Path | None) -> Checkpoint:
    """A simulation's model, or one trained for this on digits."""
    if run is not None:
        return load_checkpoint(run)
    experiment = Experiment(
        data="digits",
        model=TRAINED_MODEL,
        budgets=(bits,) * TRAINED_CLIENTS,
        rounds=TRAINED_ROUNDS,
        participation=1.0,
        epochs=TRAINED_EPOCHS,
        evaluate_every=TRAINED_ROUNDS,
    )
    with tempfile.TemporaryDirectory() as folder:
        simulation.run(simulation.prepare(experiment), Path(folder), workers=1, listener=lambda _: None)
        return load_checkpoint(Path(folder))


@lru_cache(maxsize=1)
def accuracies(bits: float, run: Path | None = None) -> dict[str, float | str]:
    """Accuracies of a trained model on its run's test images; the same for every model that is timed."""
    checkpoint = trained(bits, run)
    experiment, graph, model = checkpoint.experiment, checkpoint.graph, checkpoint.model
    method = integer_method(checkpoint.experiment, checkpoint.graph)
    train, test = simulation.load_data(experiment)
    deployed = method.deployments(model, [ClientRecord(0, bits, 1)])[0]
    exported = OnnxTarget().lower(
        DeployedModel(graph, deployed.layers, deployed.side, tuple(checkpoint.class_names))
    )
    fp32 = fp32_onnx(graph, model.final.weights, model.final.side)
    calibration = normalised(graph, train.images[:TRAINED_CALIBRATION_IMAGES])
    images, labels = test.images, test.labels
    logits = {
        "exported": OnnxRunner(exported).logits(images),
        "static_int8": float_session(quantized_statically(fp32, calibration))(normalised(graph, images)),
        "fp32": float_session(fp32)(normalised(graph, images)),
    }
    shares = {name: float(np.mean(each.argmax(axis=1) == labels)) for name, each in logits.items()}
    return {
        "accuracy_model": experiment.model,
        **{f"accuracy_{name}": round(share, 4) for name, share in shares.items()},
    }


def equality(rivals: Rivals) -> dict[str, bool]:
    model = rivals.model
    images = random_images(model.graph, COMPARED_IMAGES, seed=2)
    codes = executorch_values(model, images)
    return {
        "onnx_equal": np.array_equal(OnnxRunner(rivals.onnx).logits(images), model.logits(images)),
        "executorch_codes_equal": first_difference(model.program, images, codes) is None,
    }


def facts_of(name: str, bits: float, repetitions: int, run: Path | None = None) -> dict[str, Any]:
    before = load_average()
    # First: what is wrong with the run is told before minutes of timing.
    shares = accuracies(bits, run)
    rivals = make_rivals(make_model(name, bits))
    batches = [measure(rivals, batch, repetitions) for batch in BATCHES]
    bare = bare_bytes(rivals.model)

    def slowest(rival: str) -> float:
        return round(min(float(each["speedups"][rival]["median"]) for each in batches), 3)

    return {
        "model": name,
        "budget": bits,
        "classes": len(rivals.model.class_names),
        "bare_bytes": round(bare),
        "onnx_size_ratio": round(len(rivals.onnx) / bare, 4),
        "pte_xz_size_ratio": round(len(compress(rivals.pte)) / bare, 4),
        "fp32_size_ratio": round(len(rivals.fp32) / bare, 4),
        "static_int8_size_ratio": round(len(rivals.static_int8) / bare, 4),
        # The lesser of the two batches'.
        "onnx_speedup": slowest("onnx"),
        "executorch_speedup": slowest("executorch"),
        "static_int8_speedup": slowest("static_int8"),
        **equality(rivals),
        **shares,
        "batches": batches,
        "load_average_before": before,
        "load_average_after": load_average(),
    }


def table(facts: Mapping[str, Any]) -> str:
    lines = [
        f"{facts['model']}, {facts['budget']:g} bits, {facts['bare_bytes']:,} bytes bare; equal:"
        f" onnx {facts['onnx_equal']}, executorch codes {facts['executorch_codes_equal']};"
        f" load average {facts['load_average_before'][0]}",
        f"{'':<14}{'x bare size':>12}" + "".join(f"{f'ms at {b}':>12}{'x fp32':>8}" for b in BATCHES),
    ]
    sizes = {"onnx": "onnx", "executorch": "pte_xz", "static_int8": "static_int8", "fp32": "fp32"}
    for rival, size in sizes.items():
        cells = f"{rival:<14}{facts[f'{size}_size_ratio']:12.3f}"
        for each in facts["batches"]:
            speedup = each["speedups"].get(rival, {"median": 1.0})["median"]
            cells += f"{each['milliseconds'][rival]:12.3f}{speedup:8.2f}"
        lines.append(cells)
    trained = (f"{name} {facts[f'accuracy_{name}']:.2%}" for name in ("exported", "static_int8", "fp32"))
    lines.append(f"accuracy of a trained {facts['accuracy_model']}: {', '.join(trained)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.inference", description=__doc__)
    parser.add_argument("--model", choices=zoo.names(), default="resnet20")
    parser.add_argument("--bits", type=float, default=4.0, help="bits per weight (default %(default)s)")
    parser.add_argument(
        "--run", type=Path, help="a simulation's folder, whose accuracy is compared (default: trains digits)"
    )
    parser.add_argument("--repetitions", type=int, default=15, help="turns per rival (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    warn_if_busy()
    try:
        facts = facts_of(arguments.model, arguments.bits, arguments.repetitions, arguments.run)
    except ValueError as error:
        sys.exit(f"bench.inference: {error}")
    print(json.dumps(facts) if arguments.json else table(facts))


if __name__ == "__main__":
    main()
