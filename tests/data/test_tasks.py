"""What data hold, and what a task makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedmpq.data.data_source import load_form, load_samples
from fedmpq.data.dataset import DataError, Dataset
from fedmpq.data.fitting import Form
from fedmpq.data.in_memory import from_arrays, from_items
from fedmpq.data.named import load_measured, load_named
from fedmpq.data.open_source import open_source
from fedmpq.data.samples import Samples
from fedmpq.data.tasks import TASKS, anomalies, for_task, normal_class, trained_on

IMAGES = np.arange(6 * 4, dtype=np.uint8).reshape(6, 2, 2, 1)


def labelled(*names: str) -> Dataset:
    return Dataset(IMAGES, np.arange(6) % len(names), names)


def with_targets(targets: Any, *names: str) -> Dataset:
    rows = np.asarray(targets, np.float32)
    return Dataset(
        IMAGES, np.zeros(6, np.int64), names or tuple(map(str, range(rows.shape[1]))), targets=rows
    )


def test_a_classification_is_left_as_it_is() -> None:
    data = labelled("cat", "dog")
    assert for_task(data, "classification") is data


@pytest.mark.parametrize(("columns", "has"), [(2, "2 targets each"), (0, "no labels")])
def test_a_classification_needs_labels(columns: int, has: str) -> None:
    with pytest.raises(DataError, match=f"the samples have {has}: classification needs"):
        for_task(with_targets(np.zeros((6, columns)), "a", "b"), "classification")


def test_classes_are_labels_of_their_own() -> None:
    made = for_task(labelled("cat", "dog", "eel"), "multi_label")
    assert made.targets is not None
    assert made.targets.tolist() == 2 * [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert made.class_names == ("cat", "dog", "eel")


def test_classes_that_are_numbers_are_values() -> None:
    made = for_task(labelled("0.5", "12"), "regression")
    assert made.targets is not None
    assert made.targets.tolist() == 3 * [[0.5], [12]]
    assert made.class_names == ("value",)
    with pytest.raises(DataError, match="classes such as 'cat' and no targets"):
        for_task(labelled("cat", "7"), "regression")


def test_labels_are_0_or_1() -> None:
    data = with_targets([[0, 1], [1, 0.5]] * 3)
    assert for_task(data, "regression") is data
    with pytest.raises(DataError, match=r"targets span 0\.\.1, multi_label needs 0 or 1"):
        for_task(data, "multi_label")


def test_who_reconstructs_needs_nothing() -> None:
    without = with_targets(np.zeros((6, 0)), "0", "1")
    for task in ("multi_label", "regression"):
        with pytest.raises(DataError, match=f"no targets: {task} needs"):
            for_task(without, task)
    made = for_task(without, "reconstruction")
    assert (made.targets, made.class_names) == (None, ("0", "1"))
    assert for_task(with_targets(np.ones((6, 3))), "reconstruction").class_names == ("normal",)


@pytest.mark.parametrize(
    ("names", "normal"),
    [(("anomaly", "normal"), 1), (("0", "1"), 0), (("a",), None), (("a", "b", "normal"), None)],
)
def test_anomalies_are_not_trained_on(names: tuple[str, ...], normal: int | None) -> None:
    data = labelled(*names)
    assert normal_class(names) == normal
    found, marks = trained_on(data, "reconstruction"), anomalies(data)
    if normal is None:
        assert found is data
        assert marks is None
    else:
        assert marks is not None
        assert (marks == (data.labels != normal)).all()
        assert (found.labels == normal).all()
        assert len(found) == 3
    assert trained_on(data, "classification") is data


@pytest.mark.parametrize(
    "targets",
    [
        np.zeros((6, 2), np.float64),
        np.zeros((6, 1), np.float32),
        np.zeros((5, 2), np.float32),
        np.full((6, 2), np.nan, np.float32),
    ],
)
def test_targets_that_cannot_be(targets: NDArray[Any]) -> None:
    with pytest.raises(DataError, match="targets"):
        Dataset(IMAGES, np.zeros(6, np.int64), ("a", "b"), targets=targets)


def test_targets_go_where_their_samples_go() -> None:
    data = with_targets(np.arange(12).reshape(6, 2))
    part = data.subset([4, 1])
    assert part.targets is not None
    assert part.targets.tolist() == [[8, 9], [2, 3]]
    train, test = load_named(Source(data), task="regression")
    assert train.targets is not None
    assert test.targets is not None
    both = sorted([*train.targets[:, 0], *test.targets[:, 0]])
    assert both == [0, 2, 4, 6, 8, 10]


class Source:
    def __init__(self, data: Dataset) -> None:
        self._data = data

    def splits(self) -> Any:
        return ("train",)

    def load(self, split: Any, size: Any) -> Dataset:
        return self._data


# Where they come from


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (np.array([0.5, 1, 2, 3, 4, 5]), [[0.5], [1], [2], [3], [4], [5]]),
        (np.array([[1, 0], [0, 1]] * 3), [[1, 0], [0, 1]] * 3),
        (np.array([[True, False, True]] * 6), [[1, 0, 1]] * 6),
    ],
)
def test_arrays_of_targets(answers: NDArray[Any], expected: list[list[float]]) -> None:
    made = from_arrays(IMAGES, answers)
    assert made.targets is not None
    assert made.targets.tolist() == expected
    assert made.class_names == tuple(map(str, range(len(expected[0]))))


def test_arrays_without_anything_known() -> None:
    made = from_arrays(IMAGES)
    assert made.targets is not None
    assert made.targets.shape == (6, 0)
    with pytest.raises(DataError, match="give one whole number for each of the 6"):
        from_arrays(IMAGES, np.zeros((5, 2)))


def one_by_one() -> Iterator[tuple[Any, Any]]:
    for index in range(6):
        yield np.full((3,), index, np.float32), np.array([index, -index], np.float32)


def scalars() -> Iterator[tuple[Any, Any]]:
    for index in range(6):
        yield np.full((3,), index, np.float32), index / 2


def several() -> Iterator[tuple[Any, Any]]:
    for index in (0, 3):
        rows = np.arange(index, index + 3)
        yield np.repeat(rows[:, None], 3, axis=1).astype(np.float32), np.stack([rows, -rows], axis=1)


@pytest.mark.parametrize(("items", "factors"), [(one_by_one, [1, -1]), (scalars, [0.5]), (several, [1, -1])])
def test_items_with_targets(items: Any, factors: list[float]) -> None:
    made = from_items(items())
    assert made.targets is not None
    np.testing.assert_array_equal(made.targets, np.arange(6)[:, None] * np.array(factors))
    np.testing.assert_array_equal(made.values[:, 0, 0, 0], np.arange(6))


def test_an_archive_of_targets(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    values = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    np.savez(path, samples=values, targets=np.arange(6), class_names=["load"])
    form = Form(1, 1, 3, task="regression")
    with pytest.raises(DataError, match=r"set\.npz: .*data_range"):
        load_form(open_source(path), str(path), "train", form)
    found = load_samples(open_source(path), str(path), "train", task="regression")
    assert found.targets is not None
    assert found.targets.tolist() == [[0], [1], [2], [3], [4], [5]]
    assert found.class_names == ("load",)
    with pytest.raises(DataError, match=r"set\.npz: the samples have 1 targets each: classification"):
        load_measured(str(path))


def test_an_archive_of_what_is_normal(tmp_path: Path) -> None:
    """Training samples without labels, and test samples that are told apart."""
    path = tmp_path / "set.npz"
    np.savez(path, samples=IMAGES[:4, 0, 0], samples_test=IMAGES[4:, 0, 0], labels_test=np.array([0, 1]))
    train, test = load_named(str(path), task="reconstruction")
    assert (len(train), train.class_names, train.targets) == (4, ("0", "1"), None)
    assert test.labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="the samples have no labels"):
        load_named(str(path))


def test_every_task_has_an_answer_to_digits() -> None:
    for task in TASKS:
        train, test = load_named("digits", task=task)
        assert len(train) + len(test) == 1797
        outputs = {"multi_label": 10, "regression": 1}.get(task)
        assert (None if train.targets is None else train.targets.shape[1]) == outputs


def table(path: Path, rows: int = 8, names: str = "ax,ay,load,wear") -> Path:
    lines = [f"{n},{-n},{n / 2},{n % 2}" for n in range(rows)]
    path.write_text("\n".join((names, *lines)) + "\n", encoding="utf-8")
    return path


def test_columns_of_targets(tmp_path: Path) -> None:
    """A window has the targets of its last row; a gap in them leaves it out."""
    path = table(tmp_path / "readings.csv")
    found = read(f"{path}?window=4&hop=2&targets=wear,load", "regression")
    assert found.targets is not None
    assert found.targets.tolist() == [[1, 1.5], [1, 2.5], [1, 3.5]]
    assert (found.class_names, found.values.shape) == (("wear", "load"), (3, 1, 4, 2))
    np.testing.assert_array_equal(found.values[1, 0, :, 0], [2, 3, 4, 5])
    text = path.read_text(encoding="utf-8").replace("5,-5,2.5,1", "5,-5,,1")
    path.write_text(text, encoding="utf-8")
    assert len(read(f"{path}?window=4&hop=2&targets=wear,load", "regression")) == 2


def test_a_table_without_classes(tmp_path: Path) -> None:
    path = table(tmp_path / "readings.csv")
    assert read(str(path), "reconstruction").values.shape == (8, 1, 1, 4)
    with pytest.raises(DataError, match=r"no labels: .* with \?label="):
        read(str(path), "classification")
    for options, message in (
        ("?targets=speed", r"no column 'speed', only ax, ay, load, wear: correct \?targets="),
        ("?targets=load&label=wear", "exclude each other"),
        ("?label=class", r"no column 'class', .* correct \?label="),
    ):
        with pytest.raises(DataError, match=message):
            read(f"{path}{options}", "regression")
    table(tmp_path / "other.csv", names="ax,ay,load,label")
    with pytest.raises(DataError, match="some of its tables have a column 'label', others not"):
        read(f"{tmp_path}?columns=ax,ay", "reconstruction")


def read(spec: str, task: Any) -> Samples:
    return load_samples(open_source(spec), spec, "train", task=task)
