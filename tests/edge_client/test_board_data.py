"""A board's images under the model's labels and at the model's size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.data.dataset import DataError, Dataset
from fedmpq.edge_client.board_data import MAX_EVALUATED, fitted, labelled, load_board_data

MODEL = ("ant", "bee", "cat", "dog")
_save: Any = np.savez  # its stub takes every keyword for the one flag it has


def dataset(labels: list[int], names: tuple[str, ...], size: tuple[int, int, int] = (6, 5, 3)) -> Dataset:
    images = np.zeros((len(labels), *size), np.uint8)
    return Dataset(images, np.array(labels, np.int64), names)


def test_classes_are_found_by_their_names() -> None:
    data = labelled(dataset([0, 1, 1, 0], ("dog", "bee")), MODEL)
    assert data.labels.tolist() == [3, 1, 1, 3]
    assert data.class_names == MODEL


def test_labels_without_names_are_the_models_already() -> None:
    numbered = dataset([0, 2, 3], ("0", "1", "2", "3"))
    assert labelled(numbered, MODEL).labels.tolist() == [0, 2, 3]
    with pytest.raises(DataError, match=r"label 3 is none of the model's: its 2 classes \(ant, bee\)"):
        labelled(numbered, MODEL[:2])


def test_numbers_that_are_names_are_names() -> None:
    assert labelled(dataset([0, 1], ("3", "5")), ("5", "4", "3")).labels.tolist() == [2, 0]


def test_an_unknown_class_is_named() -> None:
    with pytest.raises(DataError, match="class 'emu' is none of the model's 4 classes"):
        labelled(dataset([0, 1], ("bee", "emu")), MODEL)


def test_an_unknown_class_without_images_does_not_matter() -> None:
    assert labelled(dataset([0, 0], ("bee", "emu")), MODEL).labels.tolist() == [1, 1]


def test_images_take_the_models_size(make_model: Callable[..., Any]) -> None:
    graph = make_model().graph
    same = dataset([0], ("a",))
    assert fitted(same, graph) is same
    assert fitted(dataset([0], ("a",), (12, 10, 3)), graph).image_shape == (6, 5, 3)
    with pytest.raises(DataError, match="1 channels, the model takes 3"):
        fitted(dataset([0], ("a",), (6, 5, 1)), graph)


def test_models_are_measured_on_test_data_or_a_share(tmp_path: Path) -> None:
    count = 2 * MAX_EVALUATED + 1
    train = {"x_train": np.zeros((count, 4, 4), np.uint8), "y_train": np.arange(count) % 10}
    test = {"x_test": np.ones((7, 4, 4), np.uint8), "y_test": np.arange(7)}
    _save(str(tmp_path / "train.npz"), **train)
    _save(tmp_path / "test.npz", **test)
    data = load_board_data(str(tmp_path / "train.npz"), None, None)
    assert (len(data.train), len(data.evaluation)) == (count, MAX_EVALUATED)
    assert set(data.evaluation.labels.tolist()) == set(range(10))
    assert len(load_board_data(str(tmp_path / "train.npz"), str(tmp_path / "test.npz"), None).evaluation) == 7
    plain = load_board_data(str(tmp_path / "train.npz"), str(tmp_path / "train.npz"), 2)
    assert len(plain.evaluation) == MAX_EVALUATED
    assert plain.train.image_shape == (2, 2, 1)
