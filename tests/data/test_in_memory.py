"""Data that a program holds already."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedmpq.data.dataset import DataError
from fedmpq.data.in_memory import from_arrays, from_pairs
from fedmpq.data.open_source import load, splits


def test_arrays_become_a_data_set() -> None:
    grey = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    data = from_arrays(grey, [0, 2]).coded()
    assert data.image_shape == (4, 3, 1)
    assert data.class_names == ("0", "1", "2")
    assert np.array_equal(data.images[..., 0], grey)
    named = from_arrays(grey[:, ::-1, ..., None], np.array([0, 1], np.uint8), ["a", "b"]).coded()
    assert named.class_names == ("a", "b")
    assert named.images.flags.c_contiguous
    assert np.array_equal(named.images[..., 0], grey[:, ::-1])


class Pairs:
    def __init__(self, *items: object) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        return self.items[index]


def test_pairs_become_a_data_set() -> None:
    image = np.zeros((4, 3, 3), np.uint8)
    data = from_pairs(Pairs((image, 1), (image + 7, np.int64(0)))).coded()
    assert data.labels.tolist() == [1, 0]
    assert data.images[1].max() == 7


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (Pairs(), "is empty"),
        (Pairs(3), "item 0 is no pair of a sample and a label"),
        (Pairs((np.zeros((2, 2), np.int32), 0)), "int32, must be uint8, int16 or floats"),
        (Pairs((np.zeros((2, 2), np.uint8), "cat")), "item 0 is no pair of a sample and a label"),
        (Pairs((np.zeros((2, 2), np.uint8), 0), (np.zeros((3, 2), np.uint8), 0)), "differ in shape or type"),
    ],
)
def test_what_is_no_pair_of_image_and_label_is_named(pairs: Pairs, message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_pairs(pairs)


def test_pairs_are_a_source_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_pairs_source.py").write_text(
        "import numpy as np\n"
        "class Pairs:\n"
        "    classes = ('no', 'yes')\n"
        "    def __len__(self): return 6\n"
        "    def __getitem__(self, i): return np.full((4, 4, 3), 40 * i, np.uint8), i % 2\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert splits("own_pairs_source:Pairs") == ("train",)
    data = load("own_pairs_source:Pairs", "train", 2)
    assert data.image_shape == (2, 2, 3)
    assert data.class_names == ("no", "yes")
    assert data.labels.tolist() == [0, 1] * 3
