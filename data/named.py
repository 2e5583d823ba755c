"""Data sets by name: digits, Fashion-MNIST, CIFAR, a path, or a source of the user's own."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import numpy as np

from fedmpq.data.data_source import DataSource, Split, load_samples
from fedmpq.data.dataset import DataError, Dataset, Size, resized
from fedmpq.data.in_memory import InMemory
from fedmpq.data.open_source import OwnSource, load_own, names_object, open_path
from fedmpq.data.options import split_options
from fedmpq.data.samples import Samples
from fedmpq.data.stratified import stratified_split, stratified_subset
from fedmpq.data.tasks import Task
from fedmpq.data.value_range import ValueRange

FASHION_MNIST_PACKAGE = "dataset-fashion-mnist"
FASHION_MNIST_FOLDERS = (
    "/usr/share/datasets/fashion-mnist",
    "/usr/local/share/datasets/fashion-mnist",
    "~/.keras/datasets/fashion-mnist",
    "data/fashion-mnist",
    "data/FashionMNIST",
)
FASHION_MNIST_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR_FOLDERS: dict[str, str] = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
TEST_SHARE = 0.1
TEST_SHARES = {"digits": 0.2}
"""The share of the images of a source without a test split that are set aside for it, where it is another."""

Pair = tuple[Dataset, Dataset]
MeasuredPair = tuple[Samples, Samples]


def load_named(
    data: str | DataSource,
    split_seed: int = 0,
    train_limit: int | None = None,
    test_limit: int | None = None,
    size: Size | None = None,
    value_range: ValueRange | None = None,
    task: Task = "classification",
) -> Pair:
    """(train, test) of a data set as codes: those of `load_measured` by that range, at `size` by area."""
    measured = load_measured(data, split_seed, train_limit, test_limit, size, task)
    train, test = (resized(each.coded(value_range), size) for each in measured)
    return train, test


def load_measured(
    data: str | DataSource,
    split_seed: int = 0,
    train_limit: int | None = None,
    test_limit: int | None = None,
    size: Size | None = None,
    task: Task = "classification",
) -> MeasuredPair:
    """(train, test) of a data set, a source or what `open_named` makes of a text, as they were measured.

    Sets without a test split are divided, class by class, by `split_seed`: digits 80/20, another 90/10. The
    limits keep at most that many images, in the proportions of the classes, chosen by `split_seed` too.
    `size` resizes images by area; measured values are resized when they are codes. Both have what `task`
    needs.
    """
    name = data if isinstance(data, str) else type(data).__name__
    source = open_named(data) if isinstance(data, str) else OwnSource(data, name)
    train, test = _both_splits(source, name, split_seed, size, task)
    # Where a size is given, only the channels must agree.
    first = 1 if size is None else 3
    shape, other = train.values.shape[first:], test.values.shape[first:]
    if shape != other or train.class_names != test.class_names:
        raise DataError(
            f"{name}: training images are {shape} in {len(train.class_names)} classes, "
            f"test images {other} in {len(test.class_names)}: both must agree, "
            "give a size or correct the files"
        )
    return _limited(name, train, train_limit, split_seed), _limited(name, test, test_limit, split_seed)


def open_named(spec: str) -> DataSource:
    """The source "digits", "fashion-mnist", "cifar10:DIR", "cifar100:DIR", a path or `package.module:Class`.

    A path that holds torchvision's CIFAR folders is read as such.
    """
    if spec == "digits":
        return InMemory(_digits())
    if spec == "fashion-mnist":
        return FashionMnist()
    name, colon, folder = spec.partition(":")
    if colon and name in CIFAR_FOLDERS:
        return Cifar(name, Path(folder).expanduser())
    if names_object(spec):
        return load_own(spec)
    path = Path(split_options(spec)[0]).expanduser()
    if not path.exists():
        names = ", ".join(["digits", "fashion-mnist", *(f"{name}:DIR" for name in CIFAR_FOLDERS)])
        raise DataError(
            f"{spec}: neither a known data set ({names}) nor an existing path nor package.module:Class: "
            "check the spelling"
        )
    for name, inner in CIFAR_FOLDERS.items():
        if path.name == inner or (path / inner).is_dir():
            return Cifar(name, path)
    return open_path(spec)


def _both_splits(
    source: DataSource, name: str, split_seed: int, size: Size | None, task: Task
) -> MeasuredPair:
    train = load_samples(source, name, "train", size, task)
    if "test" in source.splits():
        return train, load_samples(source, name, "test", size, task)
    return stratified_split(train, TEST_SHARES.get(name, TEST_SHARE), split_seed)


def _limited(name: str, data: Samples, limit: int | None, seed: int) -> Samples:
    if limit is None or limit >= len(data):
        return data
    if limit < 1:
        raise DataError(f"{name}: a limit of {limit} images leaves nothing: give 1 or more")
    return data.subset(stratified_subset(data.labels, limit, seed))


def _digits() -> Dataset:
    """scikit-learn's 1797 digits of 8x8; their 0..16 becomes rint(255 * v / 16)."""
    bunch = importlib.import_module("sklearn.datasets").load_digits()
    images = np.rint(bunch.images * (255.0 / 16.0)).astype(np.uint8)[..., None]
    return Dataset(images, bunch.target.astype(np.int64), tuple(str(name) for name in bunch.target_names))


class FashionMnist:
    """The idx files of Debian's package or of Keras, with the names of the classes, which the files lack."""

    def __init__(self) -> None:
        self._files = open_path(str(_fashion_mnist_folder()))

    def splits(self) -> tuple[Split, ...]:
        return tuple(self._files.splits())

    def load(self, split: Split, size: Size | None) -> Dataset:
        return dataclasses.replace(self._files.load(split, size), class_names=FASHION_MNIST_CLASSES)


def _fashion_mnist_folder() -> Path:
    for folder in FASHION_MNIST_FOLDERS:
        path = Path(folder).expanduser()
        if path.is_dir():
            return path
    raise DataError(
        f"fashion-mnist: not in {', '.join(FASHION_MNIST_FOLDERS)}: apt-get install {FASHION_MNIST_PACKAGE}, "
        "or give the folder of its idx files instead"
    )


class Cifar:
    """CIFAR's pickles through torchvision, which checks their MD5 sums before it unpickles them."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._root = path.parent if path.name == CIFAR_FOLDERS[name] else path

    def splits(self) -> tuple[Split, ...]:
        return "train", "test"

    def load(self, split: Split, size: Size | None) -> Dataset:
        from fedmpq.system.torchvision_ops import import_torchvision

        datasets = import_torchvision().datasets
        reader: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[self._name]
        try:
            source = reader(self._root, train=split == "train", download=False)
        except RuntimeError:
            raise DataError(
                f"{self._name}:{self._root}: {self._root / CIFAR_FOLDERS[self._name]} is missing or damaged: "
                "unpack CIFAR's archive there, or give a folder of JPEGs as a plain path"
            ) from None
        images = np.ascontiguousarray(source.data, np.uint8)
        return resized(Dataset(images, np.array(source.targets, np.int64), tuple(source.classes)), size)
