"""Samples under the model's labels and with its height, width and channels."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from fedmpq.data.dataset import DataError, Dataset, resize
from fedmpq.data.fitting import Form, fitted, grey, labelled, without_classes
from tests.data.files import pixels

MODEL = ("ant", "bee", "cat", "dog")


def dataset(labels: list[int], names: tuple[str, ...], size: tuple[int, int, int] = (6, 5, 3)) -> Dataset:
    images = pixels(len(labels), *size)
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


def test_a_class_can_be_left_out() -> None:
    data = dataset([0, 1, 1, 0], ("bee", "emu"))
    kept = without_classes(data, {"emu"})
    assert kept.labels.tolist() == [0, 0]
    assert np.array_equal(kept.images, data.images[[0, 3]])
    assert without_classes(data, ()) is data


def test_images_take_the_models_size_and_colours() -> None:
    same = dataset([0], ("a",))
    assert fitted(same, Form(6, 5, 3)) is same
    large = dataset([0], ("a",), (12, 10, 3))
    assert np.array_equal(fitted(large, Form(6, 5, 3)).images, resize(large.images, (6, 5)))
    dark = fitted(large, Form(6, 5, 1)).images
    assert np.array_equal(dark, resize(grey(large.images), (6, 5)))
    coloured = fitted(dataset([0], ("a",), (12, 10, 1)), Form(6, 5, 3)).images
    assert np.array_equal(coloured[..., 0], coloured[..., 2])


def test_grey_is_what_pillow_makes_of_colours() -> None:
    images = pixels(3, 40, 50, 3)
    wanted = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in images])
    assert np.array_equal(grey(images)[..., 0], wanted)


@pytest.mark.parametrize(
    ("shape", "form"), [((1, 8, 3), Form(1, 9, 3)), ((1, 8, 3), Form(4, 4, 3)), ((4, 4, 2), Form(4, 4, 3))]
)
def test_what_is_no_image_must_fit_as_it_is(shape: tuple[int, int, int], form: Form) -> None:
    with pytest.raises(DataError, match="give samples of that shape"):
        fitted(dataset([0], ("a",), shape), form)
