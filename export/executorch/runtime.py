"""Running an exported `.pte.xz` or `.pte` with ExecuTorch's own runtime."""

from __future__ import annotations

import contextlib
import io
import logging
import lzma
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedmpq.export.format import MAX_BATCH, VERSION_METHOD, ExportError, check_format


class ExecuTorchRunner:
    """A program in memory. It takes the image as int8 (N, C, H, W), which is the pixel less 128."""

    def __init__(self, model: Path | bytes, threads: int = 1) -> None:
        """A file, or the bytes of a `.pte`; all programs of a process share their threads."""
        self.what = str(model) if isinstance(model, Path) else "the program"
        content = _read(model) if isinstance(model, Path) else model
        with quiet():
            from executorch.extension.pybindings import portable_lib
            from executorch.runtime import Runtime

            portable_lib._unsafe_reset_threadpool(threads)
            try:
                # The runtime reads the bytes and the program for as long as the method lives: keep them.
                self._content = content
                self._program = Runtime.get().load_program(content)
                version = self._program.load_method(VERSION_METHOD) if self._has_version() else None
                check_format(self.what, version.execute([])[0] if version else None)
                self._method = self._program.load_method("forward")
            except RuntimeError as error:
                raise ExportError(f"{self.what} cannot be loaded, it is damaged: {error}") from None

    def _has_version(self) -> bool:
        return VERSION_METHOD in self._program.method_names

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images it takes."""
        _, channels, height, width = self._program.metadata("forward").input_tensor_meta(0).sizes()
        return height, width, channels

    def outputs(self, images: NDArray[np.uint8]) -> list[NDArray[np.generic]]:
        """All outputs for pixels, uint8 (N, H, W, C), of at most 64 images."""
        return [output.numpy() for output in self.run(executorch_input(images))]

    def run(self, stored: torch.Tensor) -> list[torch.Tensor]:
        return list(self._method.execute([stored]))

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The logits of pixels, uint8 (N, H, W, C), of as many images as there are."""
        parts = [self.outputs(images[i : i + MAX_BATCH])[0].copy() for i in range(0, len(images), MAX_BATCH)]
        return np.concatenate(parts).astype(np.float32)


def executorch_input(images: NDArray[np.uint8]) -> torch.Tensor:
    """Pixels (N, H, W, C) as a program takes them."""
    stored = (images ^ np.uint8(128)).view(np.int8).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(stored))


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise ExportError(f"there is no model at {path}; name an exported .pte.xz or .pte file")
    if path.suffix != ".xz":
        return path.read_bytes()
    try:
        return lzma.decompress(path.read_bytes())
    except lzma.LZMAError as error:
        raise ExportError(f"{path} is no .pte.xz, or it is damaged: {error}") from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the notices of torch, torchao and ExecuTorch on their own imports and deprecations."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
