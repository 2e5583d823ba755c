"""Options of a data source behind its path: `readings.csv?window=128&hop=64&label=activity`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl

from fedmpq.data.dataset import DataError

MARK = "?"
MAX_STEPS = 1 << 20


@dataclass(frozen=True)
class TableOptions:
    """How a table becomes samples; docs/data.md says more."""

    columns: tuple[str, ...] = ()
    """What is measured; by default every column but the label's and the targets'."""
    label: str | None = None
    """The column of the class, unless class folders say it; by default `label`, where there is one."""
    targets: tuple[str, ...] = ()
    """Columns of numbers that a model's outputs are compared with, in place of a class."""
    window: int | None = None
    """Rows in a sample; by default as many as the model takes, or one."""
    hop: int | None = None
    """Rows from one sample to the next; by default `window`."""


def split_options(spec: str) -> tuple[str, str]:
    """The path and what stands behind its question mark; a path that exists has none."""
    path, mark, text = spec.partition(MARK)
    return (spec, "") if not mark or Path(spec).expanduser().exists() else (path, text)


def table_options(path: Path, text: str) -> TableOptions:
    """The options of a table, checked."""
    values = _parsed(path, text)
    columns, targets = (
        tuple(part for part in values.get(name, "").split(",") if part) for name in ("columns", "targets")
    )
    if targets and "label" in values:
        raise DataError(f"{path}: ?label= and ?targets= exclude each other: keep one of them")
    window, hop = (_steps(path, name, values) for name in ("window", "hop"))
    return TableOptions(columns, values.get("label"), targets, window, hop)


def no_options(path: Path, text: str) -> None:
    """Refuse options of a source that has none."""
    if text:
        raise DataError(f"{path}: ?{text} is for tables (.csv, .parquet) alone: leave it out")


def _parsed(path: Path, text: str) -> Mapping[str, str]:
    known = [field.name for field in fields(TableOptions)]
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        raise DataError(
            f"{path}: ?{text} are no options: write them as ?window=128&hop=64&label=activity"
        ) from None
    for name, _ in pairs:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise DataError(f"{path}: a table has no option {name!r}{meant}: take {', '.join(known)}")
    return dict(pairs)


def _steps(path: Path, name: str, values: Mapping[str, str]) -> int | None:
    if name not in values:
        return None
    text = values[name]
    if not text.isdecimal() or not 1 <= int(text) <= MAX_STEPS:
        raise DataError(f"{path}: {name} = {text!r} is no number of rows in 1..{MAX_STEPS}: correct it")
    return int(text)
