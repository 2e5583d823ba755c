"""The formats a model is exported to, by name, and the endings of their files."""

from typing import Literal, get_args

Format = Literal["onnx", "executorch"]
FORMATS: tuple[Format, ...] = get_args(Format)
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "executorch": ".pte.xz"}
