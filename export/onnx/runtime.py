"""Running an exported `.onnx`: ONNX Runtime and NumPy, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from fedmpq.export.format import INPUT_NAME, METADATA_KEY, OUTPUT_NAME, ExportError, check_format

ERRORS_ONLY = 3


class OnnxRunner:
    """A session on one file. `what` names it in errors."""

    def __init__(self, model: Path | bytes, threads: int = 1, optimized: Path | None = None) -> None:
        self.what = str(model) if isinstance(model, Path) else "the model"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = ERRORS_ONLY
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
        self.session = self._session(model, options)
        self.metadata = self._metadata()

    def _session(self, model: Path | bytes, options: Any) -> Any:
        if isinstance(model, Path) and not model.is_file():
            raise ExportError(f"there is no model at {model}; name an exported .onnx file")
        content = model.read_bytes() if isinstance(model, Path) else model
        try:
            return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        # Its exceptions share no base class of their own.
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise ExportError(
                f"{self.what} cannot be loaded, it is damaged or no ONNX model: {reason}"
            ) from None

    def _metadata(self) -> dict[str, Any]:
        text = self.session.get_modelmeta().custom_metadata_map.get(METADATA_KEY)
        if text is None:
            raise ExportError(f"{self.what} is no model of fedmpq; make one with: fedmpq export")
        try:
            metadata: dict[str, Any] = json.loads(text)
            version = metadata["format"]
        except (ValueError, TypeError, KeyError):
            raise ExportError(f"{self.what} has no readable description; export it again") from None
        check_format(self.what, version)
        if not isinstance(metadata.get("classes"), list):
            raise ExportError(f"{self.what} names no classes; export it again")
        return metadata

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Height, width and channels of the images it takes."""
        _, height, width, channels = self.session.get_inputs()[0].shape
        return height, width, channels

    @property
    def class_names(self) -> list[str]:
        return list(self.metadata["classes"])

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The outputs of pixels, uint8 (N, H, W, C): logits of classes or labels, or values."""
        logits: NDArray[np.float32] = self.session.run([OUTPUT_NAME], {INPUT_NAME: images})[0]
        return logits


def float_session(model: bytes, threads: int = 1) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Any other ONNX model with one input and one output, such as the fp32 network."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = ERRORS_ONLY
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(images: NDArray[np.float32]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = session.run(None, {name: images})[0]
        return logits

    return run
