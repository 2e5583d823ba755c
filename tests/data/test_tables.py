"""Windows of tables against a plain reading of them, whatever lies in a folder."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.data.data_source import load_form, load_samples
from fedmpq.data.dataset import DataError
from fedmpq.data.fitting import Form
from fedmpq.data.open_source import open_source
from fedmpq.data.samples import Samples
from fedmpq.data.value_range import ValueRange, parse_range


def write(path: Path, rows: list[list[Any]], names: tuple[str, ...] = ("ax", "ay", "label")) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return path


def recording(count: int, start: int = 0) -> list[list[Any]]:
    return [[start + n, -n, "walk" if n < count // 2 else "run"] for n in range(count)]


def read(spec: str, form: Form | None = None) -> Samples:
    source = open_source(spec)
    assert hasattr(source, "samples")
    found: Samples = source.samples("train", form)
    return found


def test_windows_of_a_series(tmp_path: Path) -> None:
    path = write(tmp_path / "day.csv", recording(20))
    found = read(f"{path}?window=4&hop=2")
    assert found.class_names == ("run", "walk")
    starts = [n for n in range(0, 17, 2) if n + 4 <= 10 or n >= 10]
    assert found.values.shape == (len(starts), 1, 4, 2)
    assert found.labels.tolist() == [1 if n < 10 else 0 for n in starts]
    for sample, n in zip(found.values, starts, strict=True):
        assert sample[0, :, 0].tolist() == list(range(n, n + 4))
        assert sample[0, :, 1].tolist() == [-k for k in range(n, n + 4)]


def test_the_model_says_how_long_a_window_is(tmp_path: Path) -> None:
    path = write(tmp_path / "day.csv", recording(20))
    form = Form(1, 5, 2, parse_range("0..19,-19..0"))
    data = load_form(open_source(path), "day", "train", form)
    assert data.images.shape == (4, 1, 5, 2)
    assert data.images[0, 0, :, 0].tolist() == [round(255 * n / 19) for n in range(5)]
    assert open_source(path).bounds("train") == ValueRange((0, -19), (19, 0))  # type: ignore[attr-defined]


def test_rows_of_features_and_chosen_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", [[1, 2, 0], [3, 4, 2], [5, "", 1]])
    found = read(str(path))
    assert found.values.shape == (2, 1, 1, 2), "the row with a gap is left out"
    assert found.class_names == ("0", "1", "2"), "numbers are the labels themselves"
    assert read(f"{path}?columns=ay").values.ravel().tolist() == [2, 4]
    assert read(f"{path}?label=ax&columns=ay").labels.tolist() == [1, 3]


def test_recordings_of_a_folder_are_cut_one_by_one(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [[n, 0, "x"] for n in range(5)])
    write(tmp_path / "b.csv", [[10 + n, 0, "y"] for n in range(5)])
    (tmp_path / "broken.csv").write_bytes(b"ax,ay,label\n1,2\n")
    found = read(f"{tmp_path}?window=2")
    assert found.values[:, 0, :, 0].tolist() == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert [Path(path).name for path, _ in found.skipped] == ["broken.csv"]


def test_class_folders_say_the_class(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("walk", "run"):
            write(tmp_path / split / name / "0.csv", [[n, n] for n in range(4)], ("ax", "ay"))
    source = open_source(tmp_path)
    assert source.splits() == ("train", "test")
    found = load_samples(source, "a", "test")
    assert found.class_names == ("run", "walk")
    assert found.labels.tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("?windw=3", "no option 'windw' .did you mean window"),
        ("?window=0", "window = '0' is no number of rows"),
        ("?hop=x", "hop = 'x' is no number of rows"),
        ("?window", "are no options"),
        ("?label=class", "no column 'class', only ax, ay, label"),
        ("?columns=az", "no column 'az'"),
        ("?window=100", "no window of 100 rows has one label"),
        ("?columns=label", "hold no numbers"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, options: str, message: str) -> None:
    path = write(tmp_path / "day.csv", recording(20))
    with pytest.raises(DataError, match=message):
        read(f"{path}{options}")


def test_damaged_tables_are_named(tmp_path: Path) -> None:
    for content, message in (
        (b"", "has no rows"),
        (b"a,a\n1,2\n", "names a column twice"),
        (b"a,label\n1,2\n1\n", "row 3 has not 2 cells"),
        (b"\xff\xfe\x00", "cannot be read"),
    ):
        (tmp_path / "bad.csv").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read(str(tmp_path / "bad.csv"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"is for tables \(.csv, .parquet\) alone"):
        read(f"{tmp_path / 'empty'}?window=3")


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="pip install pyarrow, or save it as CSV"):
        read(str(tmp_path / "a.parquet"))


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = recording(20)
    columns = {name: [row[n] for row in rows] for n, name in enumerate(("ax", "ay", "label"))}
    parquet.write_table(pyarrow.table(columns), tmp_path / "day.parquet")
    one, other = (
        read(f"{path}?window=4") for path in (tmp_path / "day.parquet", write(tmp_path / "day.csv", rows))
    )
    assert np.array_equal(one.values, other.values)
    assert one.labels.tolist() == other.labels.tolist()
