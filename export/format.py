"""What an exported file is: its version, what goes in, what comes out."""

from __future__ import annotations

FORMAT = 1
"""Raised whenever an older reader would misread a file."""

METADATA_KEY = "fedmpq"
"""The ONNX metadata property with the JSON of format, graph, run, round and class names."""
INPUT_NAME, OUTPUT_NAME = "image", "logits"
"""`image`: pixels, uint8 (N, H, W, C). `logits`: float32 (N, classes)."""
VERSION_METHOD = "fedmpq_format"
"""The ExecuTorch method that returns the format."""
MAX_BATCH = 64
"""The most images that an ExecuTorch program takes: it plans its memory ahead. ONNX Runtime takes any."""


class ExportError(ValueError):
    """A model that cannot be exported or read, or one that does not do what the reference does."""


def check_format(what: str, found: object) -> None:
    """Refuse a file of another version."""
    if found != FORMAT:
        raise ExportError(
            f"{what} has format {found!r}, and this fedmpq reads format {FORMAT}: update fedmpq"
        )
