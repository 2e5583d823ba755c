"""Targets and classes under the names of a run."""

from __future__ import annotations

import numpy as np
import pytest

from fedmpq.data.dataset import DataError, Dataset
from fedmpq.data.naming import named_as

IMAGES = np.zeros((2, 1, 1, 3), np.uint8)
ROWS = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def with_targets(*names: str) -> Dataset:
    return Dataset(IMAGES, np.zeros(2, np.int64), names, targets=ROWS[:, : len(names)].copy())


def test_targets_are_found_by_their_names() -> None:
    made = named_as(with_targets("a", "b", "c"), ["c", "a", "b"], "regression")
    assert made.class_names == ("c", "a", "b")
    assert made.targets is not None
    assert made.targets.tolist() == [[3, 1, 2], [6, 4, 5]]


@pytest.mark.parametrize(
    ("own", "names"), [(("0", "1"), ("x", "y")), (("x", "y"), ("0", "1")), (("x",), ("y",))]
)
def test_without_names_their_order_counts(own: tuple[str, ...], names: tuple[str, ...]) -> None:
    made = named_as(with_targets(*own), names, "multi_label")
    assert made.class_names == names
    np.testing.assert_array_equal(made.targets, ROWS[:, : len(names)])


def test_targets_that_are_not_the_runs() -> None:
    with pytest.raises(DataError, match=r"have 2 targets each \(a, b\), the model 3 \(a, b, c\)"):
        named_as(with_targets("a", "b"), ["a", "b", "c"], "regression")
    with pytest.raises(DataError, match=r"target 'd' is none of the model's \(a, b\)"):
        named_as(with_targets("a", "d"), ["a", "b"], "regression")


def test_classes_are_mapped_and_reconstructions_keep_theirs() -> None:
    data = Dataset(IMAGES, np.array([0, 1]), ("cat", "dog"))
    assert named_as(data, ["dog", "cat"], "classification").labels.tolist() == [1, 0]
    assert named_as(data, ["normal"], "reconstruction") is data
