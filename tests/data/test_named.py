"""Named data sets: the embedded digits, small made-up files, and real ones where installed."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image

from fedmpq.data import named as lab_data
from fedmpq.data.dataset import DataError, Dataset, resize
from fedmpq.data.named import load_named
from fedmpq.data.stratified import stratified_split, stratified_subset
from fedmpq.system.torchvision_ops import import_torchvision

RNG = np.random.default_rng(11)


def pixels(*shape: int) -> NDArray[np.uint8]:
    return RNG.integers(0, 256, shape, np.uint8)


def rows(data: Dataset) -> set[bytes]:
    return {image.tobytes() + label.tobytes() for image, label in zip(data.images, data.labels, strict=True)}


# Choosing within classes


@given(
    hnp.arrays(np.int64, st.integers(1, 120), elements=st.integers(0, 6)), st.data(), st.integers(0, 2**32)
)
def test_subset_keeps_the_proportions(labels: NDArray[np.int64], data: st.DataObject, seed: int) -> None:
    count = data.draw(st.integers(0, len(labels)))
    chosen = stratified_subset(labels, count, seed)
    assert len(chosen) == count == len(set(chosen.tolist()))
    assert np.all(np.diff(chosen) > 0)
    for label in range(7):
        exact = np.count_nonzero(labels == label) * count / len(labels)
        assert abs(np.count_nonzero(labels[chosen] == label) - exact) < 1
    assert np.array_equal(chosen, stratified_subset(labels, count, seed))


def test_subset_depends_on_the_seed() -> None:
    labels = np.zeros(100, np.int64)
    assert not np.array_equal(stratified_subset(labels, 50, 0), stratified_subset(labels, 50, 1))


@pytest.mark.parametrize("count", [-1, 5])
def test_subset_refuses_what_is_not_there(count: int) -> None:
    with pytest.raises(DataError, match=r"0\.\.4"):
        stratified_subset(np.zeros(4, np.int64), count, 0)


def test_split_is_complete_and_disjoint() -> None:
    data = Dataset(pixels(50, 4, 4, 1), np.repeat(np.arange(5), 10), tuple("abcde"), (("x", "broken"),))
    train, test = stratified_split(data, 0.1, 3)
    assert (len(train), len(test)) == (45, 5)
    assert np.bincount(test.labels).tolist() == [1] * 5
    assert rows(train) | rows(test) == rows(data)
    assert not rows(train) & rows(test)
    assert (train.skipped, test.skipped) == (data.skipped, ())


def test_split_of_one_image_is_refused() -> None:
    with pytest.raises(DataError, match="at least 2"):
        stratified_split(Dataset(pixels(1, 4, 4, 1), np.zeros(1, np.int64), ("a",)), 0.1, 0)


# digits


def test_digits() -> None:
    load_digits = importlib.import_module("sklearn.datasets").load_digits
    train, test = load_named("digits")
    assert (len(train), len(test)) == (1438, 359)
    assert train.image_shape == test.image_shape == (8, 8, 1)
    assert train.class_names == test.class_names == tuple("0123456789")
    levels = {round(v * 255 / 16) for v in range(17)}
    assert set(np.unique(train.images).tolist()) == levels
    originals = {np.rint(image * 255 / 16).astype(np.uint8).tobytes() for image in load_digits().images}
    assert {image.tobytes() for image in train.images} | {
        image.tobytes() for image in test.images
    } == originals
    assert np.ptp(np.bincount(test.labels)) <= 3


def test_limits_and_seeds() -> None:
    train, test = load_named("digits", train_limit=100, test_limit=10_000)
    assert (len(train), len(test)) == (100, 359)
    assert np.bincount(train.labels).min() >= 9
    assert np.array_equal(train.images, load_named("digits", train_limit=100)[0].images)
    assert rows(train) <= rows(load_named("digits")[0])
    assert rows(load_named("digits", split_seed=1)[1]) != rows(test)
    with pytest.raises(DataError, match="1 or more"):
        load_named("digits", test_limit=0)


def test_size_halves_exactly() -> None:
    full, half = load_named("digits")[1], load_named("digits", size=4)[1]
    assert half.image_shape == (4, 4, 1)
    assert np.array_equal(half.images, resize(full.images, 4))
    assert np.array_equal(half.labels, full.labels)


# Paths


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    path.write_bytes(
        bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    )


def write_mnist(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", 20), ("t10k", 10)):
        write_idx(folder / f"{prefix}-images-idx3-ubyte", pixels(count, 28, 28))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8))


def test_fashion_mnist_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "fashion")
    monkeypatch.setattr(
        lab_data, "FASHION_MNIST_FOLDERS", (str(tmp_path / "none"), str(tmp_path / "fashion"))
    )
    train, test = load_named("fashion-mnist", size=14)
    assert (len(train), len(test)) == (20, 10)
    assert train.image_shape == (14, 14, 1)
    assert train.class_names[0] == "T-shirt/top"
    assert load_named(str(tmp_path / "fashion"))[1].class_names == tuple("0123456789")


def test_fashion_mnist_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_data, "FASHION_MNIST_FOLDERS", ("no/such/folder",))
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist"):
        load_named("fashion-mnist")


def test_class_folders_are_split_nine_to_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for n in range(20):
            Image.fromarray(pixels(4, 4, 3)).save(tmp_path / name / f"{n}.png")
    train, test = load_named(str(tmp_path), split_seed=5)
    assert np.bincount(train.labels).tolist() == [18, 18]
    assert np.bincount(test.labels).tolist() == [2, 2]
    assert np.array_equal(test.images, load_named(str(tmp_path), split_seed=5)[1].images)
    assert load_named(str(tmp_path), size=3)[0].image_shape == (3, 3, 3)


def test_splits_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    labels = np.zeros(2, np.int64)
    np.savez(path, x_train=pixels(2, 8, 8), y_train=labels, x_test=pixels(2, 6, 6), y_test=labels)
    with pytest.raises(DataError, match="both must agree"):
        load_named(str(path))
    assert load_named(str(path), size=4)[1].image_shape == (4, 4, 1)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match=r"digits, fashion-mnist, cifar10:DIR, cifar100:DIR"):
        load_named("cifer10")


# CIFAR


def pickled(path: Path, content: dict[str, Any]) -> str:
    """Write CIFAR's pickle; its MD5 sum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def write_cifar(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, tuple[NDArray[np.uint8], list[int]]]:
    """A small CIFAR whose MD5 sums torchvision is told, so that its integrity check runs for real."""
    reader: Any = getattr(import_torchvision().datasets, name.upper())
    label_key = "labels" if name == "cifar10" else "fine_labels"
    made: dict[str, tuple[NDArray[np.uint8], list[int]]] = {}
    for attribute in ("train_list", "test_list"):
        entries = []
        images, labels = [], []
        for file_name, _ in getattr(reader, attribute):
            batch, targets = pixels(10, 3072), [int(n) for n in RNG.permutation(10)]
            entries.append(
                [
                    file_name,
                    pickled(root / reader.base_folder / file_name, {"data": batch, label_key: targets}),
                ]
            )
            images.append(batch.reshape(-1, 3, 32, 32))
            labels.extend(targets)
        made[attribute.removesuffix("_list")] = (np.concatenate(images), labels)
        monkeypatch.setattr(reader, attribute, entries)
    names = [f"class{n}" for n in range(10 if name == "cifar10" else 100)]
    digest = pickled(root / reader.base_folder / reader.meta["filename"], {reader.meta["key"]: names})
    monkeypatch.setattr(reader, "meta", {**reader.meta, "md5": digest})
    return made


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, classes: int) -> None:
    made = write_cifar(tmp_path, name, monkeypatch)
    inner = tmp_path / lab_data.CIFAR_FOLDERS[name]
    for spec in (f"{name}:{tmp_path}", f"{name}:{inner}", str(tmp_path), str(inner)):
        for split, data in zip(("train", "test"), load_named(spec), strict=True):
            images, labels = made[split]
            assert np.array_equal(data.images, images.transpose(0, 2, 3, 1))
            assert data.labels.tolist() == labels
            assert data.class_names == tuple(f"class{n}" for n in range(classes))
    assert load_named(f"{name}:{tmp_path}", size=16, train_limit=10)[0].images.shape == (10, 16, 16, 3)


def test_damaged_or_missing_cifar_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar(tmp_path, "cifar10", monkeypatch)
    victim = tmp_path / "cifar-10-batches-py" / "test_batch"
    victim.write_bytes(victim.read_bytes()[:-1])
    for spec, folder in (
        (f"cifar10:{tmp_path}", "cifar-10-batches-py"),
        (f"cifar100:{tmp_path}", "cifar-100-python"),
        (f"cifar10:{tmp_path / 'none'}", "cifar-10-batches-py"),
    ):
        with pytest.raises(DataError, match=f"{folder} is missing or damaged"):
            load_named(spec)


# Real files, where installed


def test_real_fashion_mnist() -> None:
    try:
        train, test = load_named("fashion-mnist", size=14, train_limit=10_000)
    except DataError as error:
        pytest.skip(str(error))
    assert (train.images.shape, len(test)) == ((10_000, 14, 14, 1), 10_000)
    assert np.bincount(train.labels).tolist() == [1000] * 10


def test_real_cifar10_jpegs(tmp_path: Path) -> None:
    """The archive's first 1500 images; they belong to two classes of one split."""
    archive = Path(__file__).parents[3] / "shared" / "data" / "cifar10.tar.xz"
    if not archive.is_file():
        pytest.skip("no archive of CIFAR-10 JPEGs beside the repository (shared/data/cifar10.tar.xz)")
    with tarfile.open(archive) as tar:
        for member in itertools.islice((each for each in tar if each.isfile()), 1500):
            content = tar.extractfile(member)
            assert content is not None
            _, _, label, name = Path(member.name).parts
            (tmp_path / label).mkdir(exist_ok=True)
            (tmp_path / label / name).write_bytes(content.read())
    train, test = load_named(str(tmp_path))
    assert (len(train), len(test)) == (1350, 150)
    assert train.image_shape == (32, 32, 3)
    assert train.class_names == ("airplane", "automobile")
    assert train.skipped == ()
    assert 100 < train.normalisation()[1] < 160
