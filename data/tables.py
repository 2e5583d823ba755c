"""Time series and features in tables: CSV with the standard library, Parquet where pyarrow is installed.

A file is one recording; its first line names the columns. A sample is a window of rows, (C, L) with a channel
for each column, or a single row of features, (F,). The class is that of the label's column, the same in all
rows of a window (windows across a change are left out), or that of the folder the file lies in. In its place
there may be columns of targets, of which a window has those of its last row, or nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.class_folders import ClassFolders
from fedmpq.data.data_source import Split
from fedmpq.data.dataset import MAX_CLASSES, DataError, Dataset, Size
from fedmpq.data.fitting import Form
from fedmpq.data.options import TableOptions
from fedmpq.data.samples import Samples, channels_first
from fedmpq.data.skipping import check_skipped
from fedmpq.data.value_range import ValueRange

SUFFIXES = (".csv", ".parquet")
LABEL = "label"
"""The column of the class, unless the options say otherwise."""

Values = NDArray[np.float32]


def is_table(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


class TableSource:
    """A table, a folder of tables, or class folders of tables; `splits` is empty where there are none."""

    def __init__(self, path: Path, options: TableOptions | None = None) -> None:
        self._path, self._options = path, options or TableOptions()
        self._folders = None if path.is_file() else ClassFolders(path, is_table)
        if self._folders is not None and not self._folders.has_files():
            self._folders = None
        flat = [path] if path.is_file() else [each for each in _listed(path) if is_table(each.name)]
        self._flat = [] if self._folders is not None else flat

    def splits(self) -> tuple[Split, ...]:
        if self._folders is not None:
            return self._folders.splits()
        return ("train",) if self._flat else ()

    def load(self, split: Split, size: Size | None) -> Dataset:
        return self.samples(split).coded()

    def samples(self, split: Split, form: Form | None = None) -> Samples:
        """The windows of all files; without a window of its own it is as long as the form is wide."""
        window = self._options.window or (form.width if form is not None else 1)
        tables, hop = self._read(split), self._options.hop or window
        cut = [_windows(table, window, hop) for table in tables]
        values = np.concatenate([each for each, _, _ in cut])
        names = [name for _, labels, _ in cut for name in labels]
        if not names:
            raise DataError(
                f"{self._path}: no window of {window} rows has one label: give a smaller window, or more rows"
            )
        shaped = channels_first(str(self._path), values if window > 1 else values[:, :, 0])
        if not tables[0].is_labelled:
            targets, zeros = np.concatenate([each for _, _, each in cut]), np.zeros(len(names), np.int64)
            called = self._options.targets or ("0",)
            return Samples(str(self._path), shaped, zeros, called, tables[0].skipped, targets)
        class_names = self._class_names(split, names)
        label_of = {name: label for label, name in enumerate(class_names)}
        labels = np.array([label_of[name] for name in names], np.int64)
        return Samples(str(self._path), shaped, labels, class_names, tables[0].skipped)

    def bounds(self, split: Split) -> ValueRange | None:
        """Of all rows, whatever windows they are cut into."""
        tables = self._read(split)
        rows = np.concatenate([table.values for table in tables])
        labels = np.zeros(len(rows), np.int64)
        return Samples(str(self._path), channels_first("", rows), labels, ("",)).bounds()

    def _class_names(self, split: Split, found: Sequence[str]) -> tuple[str, ...]:
        if self._folders is not None:
            return self._folders.labelled(split).class_names
        names = sorted(set(found))
        numbers = [int(name) for name in names if name.isdecimal()]
        if max(len(names), *numbers, 0) > MAX_CLASSES:
            raise DataError(
                f"{self._path}: column {self._options.label or LABEL!r} holds more than {MAX_CLASSES} "
                "classes: number them anew"
            )
        if len(numbers) == len(names):
            # Numbers are the labels themselves, also where a board lacks some.
            return tuple(str(label) for label in range(max(numbers) + 1))
        return tuple(names)

    def _read(self, split: Split) -> list[_Table]:
        """The readable files; the first carries what was left out."""
        if self._folders is None:
            paths, classes = [str(path) for path in self._flat], [None for _ in self._flat]
        else:
            listing = self._folders.listing(split)
            paths, classes = list(listing.paths), list(listing.classes)  # type: ignore[arg-type]
        tables: list[_Table] = []
        reasons: list[str | None] = []
        for path, label in zip(paths, classes, strict=True):
            try:
                tables.append(_read_table(Path(path), self._options, label))
                reasons.append(None)
            except DataError as error:
                if len(paths) == 1:
                    raise
                reasons.append(str(error))
        skipped = check_skipped(self._path, paths, reasons, "tables")
        if not tables:
            raise DataError(f"{self._path}: no tables here: add some ({', '.join(SUFFIXES)})")
        if len({table.columns for table in tables}) > 1:
            raise DataError(
                f"{self._path}: its tables have different columns: name those to take with ?columns="
            )
        if len({table.is_labelled for table in tables}) > 1:
            named = self._options.label or LABEL
            raise DataError(f"{self._path}: some of its tables have a column {named!r}, others not: add it")
        return [tables[0]._replace(skipped=skipped), *tables[1:]]


class _Table(NamedTuple):
    """One recording: `values` (rows, columns), NaN where a cell is no number, and the class of each row, or
    its `targets` (rows, K)."""

    columns: tuple[str, ...]
    values: Values
    labels: Sequence[str]
    targets: Values
    is_labelled: bool
    skipped: tuple[tuple[str, str], ...] = ()


def _windows(table: _Table, window: int, hop: int) -> tuple[Values, list[str], Values]:
    """(N, columns, window), and the class and the targets of each, without windows of two classes or with
    gaps."""
    starts = range(0, len(table.values) - window + 1, hop)
    kept = [
        start
        for start in starts
        if len(set(table.labels[start : start + window])) == 1
        and np.isfinite(table.values[start : start + window]).all()
        and np.isfinite(table.targets[start + window - 1]).all()
    ]
    values = np.empty((len(kept), len(table.columns), window), np.float32)
    for row, start in enumerate(kept):
        values[row] = table.values[start : start + window].T
    last = np.array(kept, np.int64) + window - 1
    return values, [table.labels[start] for start in kept], table.targets[last]


def _listed(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))


def _read_table(path: Path, options: TableOptions, label: str | None) -> _Table:
    """The named columns of a file; `label` is the class of all its rows where its folder says it."""
    read = _read_parquet if path.suffix.lower() == ".parquet" else _read_csv
    try:
        cells = read(path)
    except DataError:
        raise
    except Exception as error:  # a damaged file makes its reader raise nearly anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read ({reason}): save it again") from None
    rows = len(next(iter(cells.values()), ()))
    if not rows:
        raise DataError(f"{path}: has no rows: it needs a line of column names and one row at least")
    named = options.label or LABEL
    if options.label is not None and label is None and named not in cells:
        raise DataError(f"{path}: has no column {named!r}, only {', '.join(cells)}: correct ?label=")
    columns = options.columns or tuple(name for name in cells if name not in (named, *options.targets))
    for option, wanted in (("columns", columns), ("targets", options.targets)):
        if missing := [name for name in wanted if name not in cells]:
            raise DataError(
                f"{path}: has no column {missing[0]!r}, only {', '.join(cells)}: correct ?{option}="
            )
    if not columns:
        raise DataError(f"{path}: has no column beside {named!r}: nothing is measured")
    values = np.stack([_numbers(cells[name]) for name in columns], axis=1)
    if not np.isfinite(values).any():
        raise DataError(
            f"{path}: its columns {', '.join(columns)} hold no numbers: name others with ?columns="
        )
    targets = [_numbers(cells[name]) for name in options.targets]
    known = np.stack(targets, axis=1) if targets else np.zeros((rows, 0), np.float32)
    if targets or (label is None and named not in cells):
        return _Table(tuple(columns), values, [""] * rows, known, is_labelled=False)
    labels = [label] * rows if label is not None else [_text(cell) for cell in cells[named]]
    return _Table(tuple(columns), values, labels, known, is_labelled=True)


def _read_csv(path: Path) -> dict[str, Sequence[Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        names = [name.strip() for name in next(lines, [])]
        rows = [row for row in lines if row]
    if len(set(names)) != len(names):
        raise DataError(f"{path}: names a column twice in its first line: rename one")
    if any(len(row) != len(names) for row in rows):
        bad = next(number for number, row in enumerate(rows, 2) if len(row) != len(names))
        raise DataError(f"{path}: row {bad} has not {len(names)} cells as the first line: correct it")
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _read_parquet(path: Path) -> dict[str, Sequence[Any]]:
    try:
        import pyarrow.parquet as parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise DataError(
            f"{path}: Parquet is read by pyarrow, which is not installed: pip install pyarrow, or save it "
            "as CSV"
        ) from None
    table: Any = parquet.read_table(path)
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _numbers(cells: Sequence[Any]) -> Values:
    """Floats; NaN for what is none."""

    def number(cell: Any) -> float:
        try:
            return float(cell)
        except (TypeError, ValueError):
            return float("nan")

    return np.array([number(cell) for cell in cells], np.float32)


def _text(cell: Any) -> str:
    text = str(cell).strip()
    # Spreadsheets write whole numbers as 3.0.
    return text[:-2] if text.endswith(".0") and text[:-2].isdecimal() else text
