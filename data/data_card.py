"""What an exported model's card tells of its input beyond pixels: how samples were made into 8-bit codes."""

from __future__ import annotations

from typing import Any

from fedmpq.data.data_source import DataSource
from fedmpq.data.dataset import DataError
from fedmpq.data.image_folders import ImageFolders
from fedmpq.data.named import open_named
from fedmpq.data.sound import SoundFolders, describe_features
from fedmpq.data.value_range import ValueRange

PHOTOS = {
    "kind": "photos",
    "reading": "the whole image, upright by EXIF, RGB or grey without alpha, resized by area (BOX filter)",
}
CODE = "clip(rint((x - low) * 255 / (high - low)), 0, 255) in float32, for each channel"


def data_facts(data: str | DataSource | None, value_range: ValueRange | None) -> dict[str, Any]:
    """`{"data": ...}` for the card, or nothing where there is nothing to say."""
    facts = _kind(data)
    if value_range is not None:
        ends = [list(pair) for pair in zip(value_range.low, value_range.high, strict=True)]
        facts |= {"kind": "measured", "range": ends, "code": CODE}
    return {"data": facts} if facts else {}


def _kind(data: str | DataSource | None) -> dict[str, Any]:
    if data is None:
        return {}
    try:
        source = open_named(data) if isinstance(data, str) else data
    # The data may be gone when a model is exported; a missing library is no reason not to.
    except (DataError, ImportError, OSError):
        return {}
    if isinstance(source, SoundFolders):
        return describe_features()
    return dict(PHOTOS) if isinstance(source, ImageFolders) else {}
