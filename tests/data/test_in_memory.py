"""Data that a program holds already."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from fedmpq.data.data_source import MeasuredSource
from fedmpq.data.dataset import DataError
from fedmpq.data.fitting import Form
from fedmpq.data.in_memory import from_arrays, from_pairs
from fedmpq.data.named import load_named
from fedmpq.data.open_source import load, open_source, splits
from fedmpq.data.value_range import ValueRange, parse_range
from fedmpq.edge_client.board_data import NamedData


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


OWN = """
import numpy as np

VALUES = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
LABELS = np.arange(10) % 3

def one_by_one():
    for value, label in zip(VALUES, LABELS):
        yield value, int(label)

def in_batches():
    yield VALUES[:4], LABELS[:4]
    yield VALUES[4:], LABELS[4:]

def arrays():
    return VALUES, LABELS

class Pairs:
    def __len__(self): return 10
    def __getitem__(self, i): return VALUES[i], LABELS[i]

def tensors():
    import torch
    return [(torch.from_numpy(value), torch.tensor(label)) for value, label in zip(VALUES, LABELS)]

def coloured():
    import torch
    for label in (0, 1):
        yield torch.full((3, 4, 5), label, dtype=torch.uint8), label

def fails():
    yield VALUES[0], 0
    raise RuntimeError("the sensor is gone")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_values.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_values", raising=False)
    return "own_values"


@pytest.mark.parametrize("name", ["one_by_one", "in_batches", "arrays", "Pairs", "tensors"])
def test_whatever_gives_samples_and_labels_is_a_source(own: str, name: str) -> None:
    """On a board as in a simulation, and also when it is read a second time."""
    wanted = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
    source = open_source(f"{own}:{name}")
    assert isinstance(source, MeasuredSource)
    for _ in range(2):
        found = source.samples("train")
        assert np.array_equal(found.values, wanted.transpose(0, 2, 1)[:, None])
        assert found.labels.tolist() == [n % 3 for n in range(10)]
    assert source.bounds("train") == ValueRange((0, 3), (56, 59))
    train, test = load_named(f"{own}:{name}", value_range=parse_range("0..59"))
    assert len(train) + len(test) == 10
    board = NamedData(f"{own}:{name}")
    assert board.bounds == ValueRange((0, 3), (56, 59))
    data = board.load(Form(1, 3, 2, parse_range("0..59")), ("0", "1", "2"))
    assert data.train.images[0, 0, :, 1].tolist() == [round(255 * value / 59) for value in (3, 4, 5)]
    assert not board.has_changed()


def test_tensors_of_bytes_have_their_channels_first(own: str) -> None:
    assert load(f"{own}:coloured", "train").image_shape == (4, 5, 3)


def test_an_error_of_the_users_function_names_it(own: str) -> None:
    with pytest.raises(DataError, match=r"data source 'own_values:fails'.*RuntimeError: the sensor is gone"):
        load(f"{own}:fails", "train")


def test_the_documented_function_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    code = page.split("# machines.py\n")[1].split("```")[0]
    (tmp_path / "machines.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    data = NamedData("machines:vibration").load(Form(1, 128, 3, parse_range("-6..6")), ("0", "1"))
    assert data.train.images.shape == (200, 1, 128, 3)
    assert data.train.images[1::2].std() > data.train.images[::2].std()
