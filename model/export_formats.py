"""The formats a model is exported to, by name, and the endings of their files."""

SUFFIXES = {"onnx": ".onnx", "executorch": ".pte.xz"}
FORMATS = tuple(SUFFIXES)
