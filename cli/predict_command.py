"""`fedmpq predict`: what an exported model sees in images, or hears in recordings.

Needs ONNX Runtime and NumPy alone, and Pillow for images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError
from fedmpq.data.photo import read_photo, reason_of
from fedmpq.data.sound import is_sound, log_mel, read_wave
from fedmpq.export.format import ExportError
from fedmpq.export.onnx.runtime import OnnxRunner
from fedmpq.model.task import input_values, reconstruction_errors, sigmoid

BAR = 24


class ImageError(ValueError):
    """A file that is no image."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print what an exported .onnx model says of each image or recording: the likeliest classes, the "
        "probabilities of labels, values, or how badly it is reconstructed."
    )
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument("images", type=Path, nargs="+", metavar="FILE", help="an image or a WAV file")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="classes to print (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per image")


def run_command(arguments: argparse.Namespace) -> int:
    if arguments.top < 1:
        raise ExportError(f"--top {arguments.top} is too few; the least is 1")
    runner = OnnxRunner(arguments.model)
    faults = []
    for path in arguments.images:
        try:
            image = read_image(path, runner)
        except ImageError as error:
            faults.append(str(error))
            continue
        facts, lines = told(runner, image, arguments.top)
        if arguments.json:
            print(json.dumps({"image": str(path), **facts}))
        else:
            print("\n".join((str(path), *lines)))
    if faults:
        raise ImageError(f"{len(faults)} of {len(arguments.images)} files left out: {'; '.join(faults)}")
    return 0


def told(runner: OnnxRunner, image: NDArray[np.uint8], top: int) -> tuple[dict[str, Any], list[str]]:
    """What the model says of one image, by its task: for programs, and in lines for people."""
    outputs, names = runner.logits(image), runner.class_names
    if runner.task == "reconstruction":
        kept = runner.metadata["input"]
        values = input_values(kept["scale"], kept["zero_point"], image)
        error = float(reconstruction_errors(outputs, values)[0])
        return {"error": error}, [f"  {error:.6g}  mean squared error of the reconstruction"]
    if runner.task == "regression":
        found = {name: float(value) for name, value in zip(names, outputs[0], strict=True)}
        return {"values": found}, [f"  {value:12.6g}  {name}" for name, value in found.items()]
    many = runner.task == "multi_label"
    shares = sigmoid(outputs[0]) if many else softmax(outputs[0])
    best = [int(index) for index in np.argsort(-shares, kind="stable")[:top]]
    rows = [{"label" if many else "class": names[i], "probability": float(shares[i])} for i in best]
    lines = [f"  {shares[index]:6.1%}  {bar(shares[index])}  {names[index]}" for index in best]
    return {"labels" if many else "classes": rows}, lines


def read_image(path: Path, runner: OnnxRunner) -> NDArray[np.uint8]:
    """The pixels, or a recording's features, as the model takes them, read as in training."""
    height, width, channels = runner.image_shape
    try:
        if is_sound(path.name) and channels == 1:
            return log_mel(*read_wave(str(path)), height, width)[None, :, :, None]
        return read_photo(str(path), (height, width), channels)[None]
    except DataError:
        raise
    # Pillow raises nearly anything on a damaged file.
    except Exception as error:
        raise ImageError(f"{path} is no image that can be read: {reason_of(error, str(path))}") from None


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum(), np.float32)


def bar(share: float) -> str:
    """`share` of a bar in eighths of a character."""
    full, eighths = divmod(round(share * BAR * 8), 8)
    return ("█" * full + " ▏▎▍▌▋▊▉"[eighths].strip()).ljust(BAR)
