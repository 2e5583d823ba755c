"""What `fedmpq predict` is given: an exported model with its description, and files or folders of samples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.data_source import load_form
from fedmpq.data.dataset import DataError
from fedmpq.data.fitting import Form
from fedmpq.data.named import open_named
from fedmpq.data.photo import is_photo, read_photo, reason_of
from fedmpq.data.sound import is_sound, log_mel, read_wave
from fedmpq.data.tables import is_table
from fedmpq.data.value_range import ValueRange
from fedmpq.export.format import ExportError
from fedmpq.export.target import Runner

Images = NDArray[np.uint8]
EXECUTORCH = (".pte", ".pte.xz")


class FileError(ValueError):
    """A file of which nothing can be said."""


@dataclass(frozen=True)
class Model:
    """An exported model that runs, and what its file or its card tells of it."""

    runner: Runner
    image_shape: tuple[int, int, int]
    facts: dict[str, Any]

    @property
    def task(self) -> str:
        """Files of earlier versions classify."""
        return str(self.facts.get("task", "classification"))

    @property
    def class_names(self) -> list[str]:
        return list(self.facts["classes"])

    @property
    def value_range(self) -> ValueRange | None:
        """Of measured values; None of pixels and recordings."""
        ends = self.facts.get("data", {}).get("range")
        return None if ends is None else ValueRange(*zip(*ends, strict=True))


def load_model(path: Path) -> Model:
    """An `.onnx`, which describes itself, or a `.pte.xz` or `.pte`, which its card describes."""
    if not path.name.endswith(EXECUTORCH):
        from fedmpq.export.onnx.runtime import OnnxRunner

        runner = OnnxRunner(path)
        return Model(runner, runner.image_shape, runner.metadata)
    from fedmpq.export.card import card_path
    from fedmpq.export.executorch.runtime import ExecuTorchRunner

    program = ExecuTorchRunner(path)
    try:
        card = json.loads(card_path(path).read_text(encoding="utf-8"))
        facts = {**card, "classes": list(card["class_names"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ExportError(
            f"{path} needs its card beside it, {card_path(path).name}, which names its classes: {error}"
        ) from None
    return Model(program, program.image_shape, facts)


def samples_of(path: Path, model: Model) -> Iterator[tuple[str, Images] | FileError]:
    """The samples of a file or of all files below a folder, each with its name, as the model takes them; or
    why one cannot be read."""
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.is_file() and _is_sample(each))
        if not files:
            yield FileError(f"{path} holds no image, recording, table or .npz")
        for each in files:
            yield from samples_of(each, model)
    elif is_table(path.name) or path.suffix == ".npz":
        yield from _rows_of(path, model)
    else:
        try:
            yield str(path), _read(path, model.image_shape)
        except FileError as error:
            yield error


def _is_sample(path: Path) -> bool:
    return is_photo(path) or is_sound(path.name) or is_table(path.name) or path.suffix == ".npz"


def _rows_of(path: Path, model: Model) -> Iterator[tuple[str, Images] | FileError]:
    """Every sample of an array, every window of a table; what they are called is not asked."""
    try:
        form = Form(*model.image_shape, model.value_range, "reconstruction")
        source = open_named(str(path))
        images = load_form(source, str(path), source.splits()[0], form).images
    except (DataError, OSError) as error:
        yield FileError(str(error))
        return
    for number, image in enumerate(images):
        yield f"{path}[{number}]", image[None]


def _read(path: Path, shape: tuple[int, int, int]) -> Images:
    """The pixels, or a recording's features, as the model takes them, read as in training."""
    height, width, channels = shape
    try:
        if is_sound(path.name) and channels == 1:
            return log_mel(*read_wave(str(path)), height, width)[None, :, :, None]
        return read_photo(str(path), (height, width), channels)[None]
    except DataError as error:
        raise FileError(f"{path}: {error}") from None
    # Pillow raises nearly anything on a damaged file.
    except Exception as error:
        raise FileError(f"{path} is no image that can be read: {reason_of(error, str(path))}") from None
