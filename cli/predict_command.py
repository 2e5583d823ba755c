"""`fedmpq predict`: what an exported model says of images, recordings and measured values.

Of an `.onnx` it needs ONNX Runtime and NumPy alone, and Pillow for images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.cli.predicted_files import FileError, Images, Model, load_model, samples_of
from fedmpq.export.format import ExportError
from fedmpq.model.task import input_values, reconstruction_errors, sigmoid

BAR = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what an exported model says of each sample: the likeliest classes, the probabilities of "
        "labels, values, or how badly it is reconstructed."
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="an .onnx, .pte.xz or .pte")
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="an image, a WAV file, a table (.csv, .parquet), arrays (.npz), or a folder of them",
    )
    parser.add_argument("--top", type=int, default=5, metavar="N", help="classes to print (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per sample")


def run_command(arguments: argparse.Namespace) -> int:
    if arguments.top < 1:
        raise ExportError(f"--top {arguments.top} is too few; the least is 1")
    model, told_of, faults = load_model(arguments.model), 0, []
    for path in arguments.files:
        for found in samples_of(path, model):
            if isinstance(found, FileError):
                faults.append(str(found))
                continue
            name, image = found
            facts, lines = told(model, image, arguments.top)
            told_of += 1
            print(json.dumps({"image": name, **facts}) if arguments.json else "\n".join((name, *lines)))
    if faults:
        raise FileError(f"{len(faults)} of {told_of + len(faults)} files left out: {'; '.join(faults)}")
    return 0


def told(model: Model, image: Images, top: int) -> tuple[dict[str, Any], list[str]]:
    """What the model says of one sample, by its task: for programs, and in lines for people."""
    outputs, names = model.runner.logits(image), model.class_names
    if model.task == "reconstruction":
        kept = model.facts["input"]
        values = input_values(kept["scale"], kept["zero_point"], image)
        error = float(reconstruction_errors(outputs, values)[0])
        return {"error": error}, [f"  {error:.6g}  mean squared error of the reconstruction"]
    if model.task == "regression":
        found = {name: float(value) for name, value in zip(names, outputs[0], strict=True)}
        return {"values": found}, [f"  {value:12.6g}  {name}" for name, value in found.items()]
    many = model.task == "multi_label"
    shares = sigmoid(outputs[0]) if many else softmax(outputs[0])
    best = [int(index) for index in np.argsort(-shares, kind="stable")[:top]]
    rows = [{"label" if many else "class": names[i], "probability": float(shares[i])} for i in best]
    lines = [f"  {shares[index]:6.1%}  {bar(shares[index])}  {names[index]}" for index in best]
    return {"labels" if many else "classes": rows}, lines


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum(), np.float32)


def bar(share: float) -> str:
    """`share` of a bar in eighths of a character."""
    full, eighths = divmod(round(share * BAR * 8), 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[eighths].strip()).ljust(BAR)
