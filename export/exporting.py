"""One model into one verified file, with a card beside it that says what it is.

The card is `NAME.onnx.json` or `NAME.pte.xz.json`. A file gets its name only after it has passed: what does
not do what the integer reference does is deleted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.export import verify
from fedmpq.export.format import FORMAT, ExportError
from fedmpq.export.speed import Job, latencies, speed_up
from fedmpq.model.export_formats import SUFFIXES, Format
from fedmpq.model.graph import Graph
from fedmpq.model.integer_program import IntegerProgram, compile_program
from fedmpq.model.quantized import QuantizedLayer, average_bits, dequantize_all

RUNTIMES: dict[Format, str] = {"onnx": "onnxruntime", "executorch": "executorch"}

RANDOM_IMAGES = 16
REAL_IMAGES = 256
"""So many of each the runtime must agree on before a file is kept."""
SPEED_SECONDS = 1.0


@dataclass(frozen=True)
class Deployed:
    """A model as devices run it. `facts` go into the card: run, round, clients and the like."""

    graph: Graph
    layers: Mapping[str, QuantizedLayer]
    side: Mapping[str, NDArray[np.float32]]
    class_names: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bit_widths(self) -> dict[str, int]:
        return {node.name: self.layers[node.name].bits for node in self.graph.layers}

    @property
    def bare_bytes(self) -> float:
        """`sum b_l m_l / 8`: what no file can be smaller than without compression."""
        widths = self.bit_widths.values()
        return sum(b * m for b, m in zip(widths, self.graph.layer_sizes, strict=True)) / 8


@dataclass(frozen=True)
class LabelledImages:
    """Labelled pixels, for verification and accuracy."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Exported:
    path: Path
    card: dict[str, Any]


def export_model(
    model: Deployed,
    target: Format,
    stem: Path,
    tests: LabelledImages | None = None,
    measure_speed: bool = True,
) -> Exported:
    """Write `stem` plus the target's suffix, verified, and its card."""
    program = compile_program(model.graph, model.layers, model.side)
    content = _content(model, program, target)
    path = stem.with_name(stem.name + SUFFIXES[target])
    partial = path.with_name(f".partial-{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.write_bytes(content)
    try:
        images = _images(program, tests)
        check = verify.verify_onnx if target == "onnx" else verify.verify_executorch
        check(partial, program, model.layers, images)
        card = _card(model, target, content, len(images))
        card["accuracy"] = None if tests is None else _accuracy(partial, target, tests)
        card["speed"] = _speed(model, partial, target) if measure_speed else None
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    card_path = path.with_name(path.name + ".json")
    card_path.write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return Exported(path, card)


def runner(path: Path, target: Format) -> Callable[[NDArray[np.uint8]], NDArray[np.float32]]:
    """Pixels to logits, by the target's runtime on one thread."""
    if target == "onnx":
        from fedmpq.export.onnx_runtime import OnnxRunner

        return OnnxRunner(path).logits
    from fedmpq.export.executorch_runtime import ExecuTorchRunner

    return ExecuTorchRunner(path).logits


def _content(model: Deployed, program: IntegerProgram, target: Format) -> bytes:
    if len(model.class_names) != model.graph.shapes[model.graph.output][0]:
        raise ExportError(
            f"{len(model.class_names)} class names for the {model.graph.shapes[model.graph.output][0]}"
            f" outputs of {model.graph.name!r}: they are of another graph"
        )
    if target == "onnx":
        from fedmpq.export.onnx_lowering import lower_to_onnx

        metadata = {"graph": model.graph.id, "classes": model.class_names, **model.facts}
        return lower_to_onnx(program, model.layers, metadata).to_bytes()
    from fedmpq.export.executorch_lowering import compress, lower_to_executorch

    return compress(lower_to_executorch(program, model.layers))


def _images(program: IntegerProgram, tests: LabelledImages | None) -> NDArray[np.uint8]:
    noise = verify.random_images(program, RANDOM_IMAGES)
    return noise if tests is None else np.concatenate([noise, tests.images[:REAL_IMAGES]])


def _accuracy(path: Path, target: Format, tests: LabelledImages) -> float:
    logits = runner(path, target)(tests.images)
    return float(np.mean(logits.argmax(axis=1) == tests.labels))


def _speed(model: Deployed, path: Path, target: Format) -> dict[str, float]:
    """One image at a time, taking turns with the fp32 network in ONNX Runtime and in the file's own."""
    from fedmpq.export.float_onnx import lower_float, normalised
    from fedmpq.export.onnx_runtime import float_session

    twin = lower_float(model.graph, dequantize_all(model.layers), model.side)
    float_run = float_session(twin.SerializeToString())
    pixels = np.zeros(
        (1, model.graph.input.height, model.graph.input.width, model.graph.input.channels), np.uint8
    )
    real, run = normalised(model.graph, pixels), runner(path, target)
    jobs: dict[str, Job] = {"integer": lambda: run(pixels), RUNTIMES["onnx"]: lambda: float_run(real)}
    if target == "executorch":
        import torch

        own_run, stored = _float_program(model.graph), torch.from_numpy(real)
        jobs[RUNTIMES["executorch"]] = lambda: own_run(stored)
    taken = latencies(jobs, SPEED_SECONDS)
    speed = {"milliseconds": _milliseconds(taken["integer"])}
    for name in list(jobs)[1:]:
        speed[f"fp32_{name}_milliseconds"] = _milliseconds(taken[name])
        speed[f"speedup_over_fp32_{name}"] = round(speed_up(taken, "integer", name), 3)
    speed["speedup"] = speed[f"speedup_over_fp32_{RUNTIMES[target]}"]
    return speed


def _milliseconds(times: Sequence[float]) -> float:
    return round(float(np.median(times)) * 1e3, 4)


@lru_cache(maxsize=1)
def _float_program(graph: Graph) -> Callable[[Any], object]:
    """The network in fp32 by ExecuTorch; lowering takes seconds, and for its speed any weights will do."""
    from fedmpq.export.executorch_runtime import ExecuTorchRunner
    from fedmpq.export.float_executorch import lower_float_to_executorch

    random = np.random.default_rng(0)
    weights = {
        node.name: random.normal(0, 0.05, graph.weight_shape(node.name)).astype(np.float32)
        for node in graph.layers
    }
    side = {name: np.ones(shape, np.float32) for name, shape in graph.side_shapes().items()}
    return ExecuTorchRunner(lower_float_to_executorch(graph, weights, side)).run


def _card(model: Deployed, target: Format, content: bytes, verified: int) -> dict[str, Any]:
    image = model.graph.input
    return {
        "format": FORMAT,
        "target": target,
        "runtime": f"{RUNTIMES[target]} {version(RUNTIMES[target])}",
        "graph": model.graph.id,
        "model": model.graph.name,
        **model.facts,
        "bit_widths": model.bit_widths,
        "average_bits": round(average_bits(tuple(model.bit_widths.values()), model.graph.layer_sizes), 4),
        "bare_bytes": round(model.bare_bytes),
        "file_bytes": len(content),
        "size_ratio": round(len(content) / model.bare_bytes, 4),
        "sha256": hashlib.sha256(content).hexdigest(),
        "input": {
            "pixels": [image.height, image.width, image.channels],
            "scale": image.scale,
            "zero_point": image.zero_point,
            "note": "normalisation is inside the file: give it pixels",
        },
        "class_names": list(model.class_names),
        "verified_images": verified,
    }
