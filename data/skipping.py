"""Files that cannot be read are left out and counted, as long as they are not most of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedmpq.data.dataset import DataError

Skipped = tuple[tuple[str, str], ...]


def check_skipped(folder: Path, paths: Sequence[str], reasons: Sequence[str | None], what: str) -> Skipped:
    """(path, reason) of each file that has a reason; more than half of all is an error."""
    skipped = tuple((path, reason) for path, reason in zip(paths, reasons, strict=True) if reason)
    if 2 * len(skipped) > len(paths):
        raise DataError(
            f"{folder}: {len(skipped)} of {len(paths)} {what} are unusable, at most half may be; "
            f"the first, {skipped[0][0]}: {skipped[0][1]}"
        )
    return skipped
