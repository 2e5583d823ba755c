"""Data sources of the user's own: through the protocol of the built-in ones, with errors that name them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedmpq.data.data_source import DataSource
from fedmpq.data.dataset import DataError, Dataset
from fedmpq.data.fitting import Form
from fedmpq.data.idx import IdxSource
from fedmpq.data.image_folders import ImageFolders
from fedmpq.data.in_memory import InMemory
from fedmpq.data.named import Cifar, FashionMnist, load_named
from fedmpq.data.npz import NpzSource
from fedmpq.data.open_source import load, names_object, open_source, splits
from fedmpq.edge_client.board_data import NamedData
from fedmpq.system.named_object import require_members

MODULE = """
import numpy as np
from fedmpq.data.dataset import Dataset

def images(split):
    values = {"train": 10, "test": 20}[split]
    return Dataset(np.full((20, 4, 6, 1), values, np.uint8), np.arange(20) % 2, ("cat", "dog"))

class Both:
    def splits(self):
        return ["train", "test"]
    def load(self, split, size):
        self.asked = size
        return images(split)

class TrainOnly(Both):
    def splits(self):
        return ("train",)

def made():
    return Both()

ready = Both()

class Needs:
    def __init__(self, folder): ...

class NoLoad:
    def splits(self):
        return ("train",)

class OddSplits(Both):
    def splits(self):
        return ("train", "validation")

class NotSplits(Both):
    def splits(self):
        return None

class Arrays(Both):
    def load(self, split, size):
        return images(split).images

class Nothing(Both):
    def load(self, split, size):
        return images(split).subset([])

class Breaks(Both):
    def load(self, split, size):
        raise OSError("the disk is gone")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module of the user's, in the current folder."""
    name = "sources_of_a_user"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def values(data: Dataset) -> set[int]:
    return set(np.unique(data.images).tolist())


@pytest.mark.parametrize("attribute", ["Both", "made", "ready"])
def test_a_class_a_function_and_an_object_serve_wherever_a_path_does(module: str, attribute: str) -> None:
    spec = f"{module}:{attribute}"
    assert splits(spec) == ("train", "test")
    assert values(load(spec, "test")) == {20}
    train, test = load_named(spec)
    assert (values(train), values(test)) == ({10}, {20})
    board = NamedData(spec, spec).load(Form(*train.image_shape), train.class_names)
    assert (values(board.train), values(board.evaluation)) == ({10}, {20})
    assert board.train.class_names == ("cat", "dog")


def test_images_are_resized_where_the_source_does_not(module: str) -> None:
    assert load(f"{module}:Both", "train", (2, 3)).image_shape == (2, 3, 1)
    with pytest.raises(DataError, match=r"size 0x0 is out of range"):
        load(f"{module}:Both", "train", 0)


def test_without_a_test_split_one_is_set_aside(module: str) -> None:
    train, test = load_named(f"{module}:TrainOnly")
    assert (len(train), len(test)) == (18, 2)
    with pytest.raises(DataError, match=r"sources_of_a_user:TrainOnly: no test split here, only train"):
        load(f"{module}:TrainOnly", "test")


def test_python_objects_go_the_same_way() -> None:
    data = Dataset(np.full((20, 4, 4, 1), 7, np.uint8), np.arange(20) % 2, ("a", "b"))
    train, test = load_named(InMemory(data), size=2)
    assert (train.images.shape, test.images.shape) == ((18, 2, 2, 1), (2, 2, 2, 1))
    train, test = load_named(InMemory(data, data.subset([3])))
    assert (len(train), len(test)) == (20, 1)
    with pytest.raises(
        DataError, match=r"data source PosixPath is a PosixPath that does not fit: .*'splits' is missing"
    ):
        load_named(Path("here"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("Absent", r"data source 'sources_of_a_user:Absent' cannot be imported: AttributeError"),
        ("Needs", r"data source 'sources_of_a_user:Needs' cannot be made: TypeError: .*'folder'"),
        ("NoLoad", r"does not fit: its method 'load' is missing; see fedmpq\.data\.data_source\.DataSource"),
        (
            "OddSplits",
            r"splits\(\) gives \('train', 'validation'\): give \('train',\) or \('train', 'test'\)",
        ),
        ("NotSplits", r"splits\(\) gives None"),
        ("Arrays", r"load\('train', None\) gives a ndarray: give a fedmpq\.data\.dataset\.Dataset"),
        ("Nothing", r"load\('train', None\) gives no images: .* at least one image"),
        ("Breaks", r"load\('train', None\) failed: OSError: the disk is gone"),
    ],
)
def test_what_does_not_fit_is_named(module: str, attribute: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(f"{module}:{attribute}", "train")
    assert f"{module}:{attribute}" in str(caught.value)


def test_a_module_that_is_not_there_is_named(module: str) -> None:
    with pytest.raises(DataError, match=r"'no_such_module:Data' cannot be imported: ModuleNotFoundError"):
        load_named("no_such_module:Data")


def test_a_path_that_exists_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos:old").mkdir()
    assert not names_object("photos:old")
    assert names_object("photos:new")
    for path in ("data/photos:old", "photos", "/mnt/a:b", "C:/photos", "a b:c", "1:2", tmp_path):
        assert not names_object(path)
    with pytest.raises(DataError, match="no data set in this folder"):
        open_source("photos:old")


@pytest.mark.parametrize("kind", [NpzSource, IdxSource, ImageFolders, InMemory, FashionMnist, Cifar])
def test_the_built_in_sources_fit_too(kind: type) -> None:
    require_members(kind, DataSource, "data source")


def test_the_documented_source_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    (tmp_path / "garden.py").write_text(page.split("# garden.py\n")[1].split("```")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "garden", None)
    del sys.modules["garden"]
    train, test = load_named("garden:Photos", size=8)
    assert (train.images.shape, test.images.shape) == ((400, 8, 8, 3), (100, 8, 8, 3))
