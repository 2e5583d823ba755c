"""What an export target is: the way from a deployed model to a file, and from the file to logits.

The built-in ones are in `export.targets`. One of the user's own has the same members and is named as
`package.module:Class`; the class is called without arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    # A board that only runs files loads nothing of what makes them.
    from fedmpq.export.float_network import FloatNetwork
    from fedmpq.model.deployed import DeployedModel


Images = NDArray[np.uint8]
"""Pixels, (N, height, width, channels)."""
Reals = NDArray[np.float32]
FloatRun = Callable[[Reals], Reals]
"""Normalised images (N, channels, height, width) to logits (N, classes)."""


@dataclass(frozen=True)
class Feeding:
    """How a file takes pixels, in words for its card."""

    dtype: str
    layout: str
    stored: str


PIXELS = Feeding("uint8", "(N, height, width, channels)", "pixel")
"""Of targets that say nothing else."""


class Runner(Protocol):
    """A file that its runtime has loaded."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images it takes."""
        ...

    def logits(self, images: Images) -> Reals:
        """Logits (N, classes) of pixels; normalisation is the file's own."""
        ...


class Target(Protocol):
    """A kind of file, the runtime that runs it, and how it is made and verified."""

    @property
    def name(self) -> str:
        """What the command line, `run.toml` and the file's card call it."""
        ...

    @property
    def suffix(self) -> str:
        """How its files' names end, with the leading dot: `.onnx`."""
        ...

    @property
    def runtime(self) -> str:
        """The Python distribution that runs its files; the card tells its version."""
        ...

    def lower(self, model: DeployedModel) -> bytes:
        """The content of the model's file. There is a class name for each output."""
        ...

    def run(self, path: Path, threads: int = 1) -> Runner:
        """The file, loaded by the runtime."""
        ...

    def verify(self, path: Path, model: DeployedModel, images: Images) -> None:
        """Raises `ExportError` if the runtime computes from this file anything but `model.logits(images)`."""
        ...

    def float_twin(self, network: FloatNetwork) -> FloatRun:
        """The same network in fp32 in the same runtime on one thread: what a file's speed is told against."""
        ...
