"""The formats that a model is exported to, and the endings of their files.

Here, and not with the targets that write them: a server and a board name formats without loading a runtime.
"""

SUFFIXES: dict[str, str] = {"onnx": ".onnx", "executorch": ".pte.xz", "executorch-uncompressed": ".pte"}
FORMATS: tuple[str, ...] = tuple(SUFFIXES)
