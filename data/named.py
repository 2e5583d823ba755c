"""Data sets by name: digits, Fashion-MNIST, CIFAR, or any path that `edge_client.data` understands."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedmpq.data.dataset import DataError, Dataset, Labels, Size, load, resize, splits

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
DIGITS_TEST_SHARE = 0.2
FOLDER_TEST_SHARE = 0.1

Pair = tuple[Dataset, Dataset]


def load_named(
    spec: str,
    split_seed: int = 0,
    train_limit: int | None = None,
    test_limit: int | None = None,
    size: Size | None = None,
) -> Pair:
    """(train, test) of the set `spec`: "digits", "fashion-mnist", "cifar10:DIR", "cifar100:DIR" or a path.

    Sets without a test split are divided, class by class, by `split_seed`: digits 80/20, a path 90/10. The
    limits keep at most that many images, in the proportions of the classes, chosen by `split_seed` too.
    `size` resizes by area. A path that holds torchvision's CIFAR folders is read as such.
    """
    train, test = _load(spec, split_seed, size)
    if train.image_shape != test.image_shape or train.class_names != test.class_names:
        raise DataError(
            f"{spec}: training images are {train.image_shape} in {len(train.class_names)} classes, "
            f"test images {test.image_shape} in {len(test.class_names)}: both must agree, "
            "give a size or correct the files"
        )
    return _limited(spec, train, train_limit, split_seed), _limited(spec, test, test_limit, split_seed)


def stratified_subset(labels: Labels, count: int, seed: int) -> NDArray[np.int64]:
    """Sorted indices of `count` labels, chosen at random within each class.

    Class c gives floor(n_c * count / N), and one more where the remainder is largest (the lower class
    first) until there are `count`. The draws come from Philox(seed).
    """
    if not 0 <= count <= len(labels):
        raise DataError(f"cannot choose {count} of {len(labels)} images: ask for 0..{len(labels)}")
    rng = np.random.Generator(np.random.Philox(seed))
    members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    shares = [divmod(len(indices) * count, len(labels)) for indices in members]
    by_remainder = sorted(range(len(shares)), key=lambda c: -shares[c][1])
    extra = set(by_remainder[: count - sum(quota for quota, _ in shares)])
    chosen = [
        rng.permutation(indices)[: quota + (c in extra)]
        for c, (indices, (quota, _)) in enumerate(zip(members, shares, strict=True))
    ]
    return np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))


def stratified_split(data: Dataset, test_share: float, seed: int) -> Pair:
    """(train, test) with rint(test_share * N) test images, class by class; `skipped` stays with train."""
    test_count = min(max(round(test_share * len(data)), 1), len(data) - 1)
    if test_count < 1:
        raise DataError(f"{len(data)} image cannot be divided into training and test: at least 2 are needed")
    chosen = stratified_subset(data.labels, test_count, seed)
    rest = np.setdiff1d(np.arange(len(data)), chosen)
    return data.subset(rest), dataclasses.replace(data.subset(chosen), skipped=())


def _load(spec: str, split_seed: int, size: Size | None) -> Pair:
    if spec == "digits":
        return stratified_split(_resized(_digits(), size), DIGITS_TEST_SHARE, split_seed)
    if spec == "fashion-mnist":
        train, test = _load_path(_fashion_mnist_folder(), split_seed, size)
        return _renamed(train, FASHION_MNIST_CLASSES), _renamed(test, FASHION_MNIST_CLASSES)
    name, colon, folder = spec.partition(":")
    if colon and name in CIFAR_FOLDERS:
        return _cifar(name, Path(folder).expanduser(), size)
    path = Path(spec).expanduser()
    if not path.exists():
        names = ", ".join(["digits", "fashion-mnist", *(f"{name}:DIR" for name in CIFAR_FOLDERS)])
        raise DataError(
            f"{spec}: neither a known data set ({names}) nor an existing path: check the spelling"
        )
    for name, inner in CIFAR_FOLDERS.items():
        if path.name == inner or (path / inner).is_dir():
            return _cifar(name, path, size)
    return _load_path(path, split_seed, size)


def _load_path(path: Path, split_seed: int, size: Size | None) -> Pair:
    if "test" in splits(path):
        return load(path, "train", size), load(path, "test", size)
    return stratified_split(load(path, "train", size), FOLDER_TEST_SHARE, split_seed)


def _digits() -> Dataset:
    """scikit-learn's 1797 digits of 8x8; their 0..16 becomes rint(255 * v / 16)."""
    bunch = importlib.import_module("sklearn.datasets").load_digits()
    images = np.rint(bunch.images * (255.0 / 16.0)).astype(np.uint8)[..., None]
    return Dataset(images, bunch.target.astype(np.int64), tuple(str(name) for name in bunch.target_names))


def _fashion_mnist_folder() -> Path:
    for folder in FASHION_MNIST_FOLDERS:
        path = Path(folder).expanduser()
        if path.is_dir():
            return path
    raise DataError(
        f"fashion-mnist: not in {', '.join(FASHION_MNIST_FOLDERS)}: apt-get install {FASHION_MNIST_PACKAGE}, "
        "or give the folder of its idx files instead"
    )


def _cifar(name: str, path: Path, size: Size | None) -> Pair:
    """CIFAR's pickles through torchvision, which checks their MD5 sums before it unpickles them."""
    root = path.parent if path.name == CIFAR_FOLDERS[name] else path
    return _cifar_split(name, root, "train", size), _cifar_split(name, root, "test", size)


def _cifar_split(name: str, root: Path, split: Literal["train", "test"], size: Size | None) -> Dataset:
    from fedmpq.system.torchvision_ops import import_torchvision

    datasets = import_torchvision().datasets
    reader: Any = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    try:
        source = reader(root, train=split == "train", download=False)
    except RuntimeError:
        raise DataError(
            f"{name}:{root}: {root / CIFAR_FOLDERS[name]} is missing or damaged: unpack CIFAR's archive "
            "there, or give a folder of JPEGs as a plain path"
        ) from None
    images = np.ascontiguousarray(source.data, np.uint8)
    return _resized(Dataset(images, np.array(source.targets, np.int64), tuple(source.classes)), size)


def _resized(data: Dataset, size: Size | None) -> Dataset:
    return data if size is None else dataclasses.replace(data, images=resize(data.images, size))


def _renamed(data: Dataset, class_names: tuple[str, ...]) -> Dataset:
    return dataclasses.replace(data, class_names=class_names)


def _limited(spec: str, data: Dataset, limit: int | None, seed: int) -> Dataset:
    if limit is None or limit >= len(data):
        return data
    if limit < 1:
        raise DataError(f"{spec}: a limit of {limit} images leaves nothing: give 1 or more")
    return data.subset(stratified_subset(data.labels, limit, seed))
