"""NumPy archives and idx files: what they become, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedmpq.data.open_source import load, splits
from tests.data.files import pixels, refused, write_idx

# NumPy archives


def test_npz_with_images_and_labels(tmp_path: Path) -> None:
    path, images = tmp_path / "set.npz", pixels(3, 4, 4)
    np.savez(path, images=images, labels=np.array([2, 0, 2], np.uint8))
    for place in (path, tmp_path):
        data = load(place, "train")
        assert np.array_equal(data.images[..., 0], images)
        assert data.labels.tolist() == [2, 0, 2]
        assert data.class_names == ("0", "1", "2")
        assert splits(place) == ("train",)
    assert load(path, "train", 2).image_shape == (2, 2, 1)
    refused(path, "no test split", split="test")


def test_npz_with_both_splits_shares_the_classes(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez_compressed(
        path,
        x_train=pixels(2, 4, 4, 3),
        y_train=np.array([[0], [1]]),
        x_test=pixels(1, 4, 4, 3),
        y_test=np.array([[4]]),
    )
    assert splits(path) == ("train", "test")
    assert load(path, "train").class_names == load(path, "test").class_names == tuple("01234")
    assert load(path, "test").labels.tolist() == [4]


def test_npz_class_names(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez(
        path, images=pixels(2, 4, 4), labels=np.array([0, 1]), class_names=np.array(["cat", "dog", "eel"])
    )
    assert load(path, "train").class_names == ("cat", "dog", "eel")
    np.savez(
        path, images=pixels(2, 4, 4), labels=np.array([0, 3]), class_names=np.array(["cat", "dog", "eel"])
    )
    refused(path, "0..3", "0..2")


@given(hnp.arrays(np.uint8, (2, 3, 3)), st.sampled_from([np.float32, np.float64]))
def test_npz_floats_return_to_the_bytes_they_came_from(
    tmp_path_factory: pytest.TempPathFactory, images: NDArray[np.uint8], dtype: Any
) -> None:
    path = tmp_path_factory.mktemp("floats") / "set.npz"
    np.savez(path, images=images.astype(dtype) / 255, labels=np.zeros(2, np.int64))
    assert np.array_equal(load(path, "train").images[..., 0], images)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.full((1, 2, 2), np.nan, np.float32), np.zeros(1, np.int64), ["NaN"]),
        (np.full((1, 2, 2), 1.5, np.float32), np.zeros(1, np.int64), ["0..1", "data_range"]),
        (np.full((1, 2, 2), -0.5), np.zeros(1, np.int64), ["0..1", "data_range"]),
        (np.zeros((1, 2, 2), np.int32), np.zeros(1, np.int64), ["int32", "uint8"]),
        (np.zeros((1, 3, 32, 32), np.uint8), np.zeros(1, np.int64), ["(1, 3, 32, 32)", "call it samples"]),
        (np.zeros((4,), np.uint8), np.zeros(4, np.int64), ["(N, H, W)"]),
        (np.zeros((1, 2, 2), np.uint8), np.zeros(2, np.int64), ["one for each of 1"]),
        (np.zeros((1, 2, 2), np.uint8), np.array(["a"]), ["<U1", "numbers"]),
        (np.zeros((1, 2, 2), np.uint8), np.array([-1]), ["-1..-1", "0..65535"]),
        (np.zeros((1, 2, 2), np.uint8), np.array([2**63], np.uint64), ["0..65535"]),
        (np.zeros((0, 2, 2), np.uint8), np.zeros(0, np.int64), ["at least one"]),
        (np.zeros((1, 2, 2), np.uint8), np.array([None]), ["labels", "np.savez"]),
    ],
)
def test_npz_refusals(tmp_path: Path, images: Any, labels: Any, words: list[str]) -> None:
    path = tmp_path / "set.npz"
    np.savez(path, images=images, labels=labels)
    refused(path, *words)


def test_unreadable_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    path.write_bytes(b"not a zip")
    refused(path, "not a readable .npz")
    np.savez(path, other=np.zeros(3))
    refused(path, "no images, no samples")
    np.savez(path, images=pixels(1, 4, 4), labels=np.zeros(1, np.int64), targets=np.zeros(1))
    refused(path, "labels and targets", "keep one")
    np.savez_compressed(path, images=pixels(4, 8, 8), labels=np.zeros(4, np.int64))
    whole = bytearray(path.read_bytes())
    whole[60:120] = bytes(60)
    path.write_bytes(whole)
    refused(path, "images", "np.savez")


# idx


@pytest.mark.parametrize(
    ("test_prefix", "separator", "suffix", "inner"), [("t10k", "-", ".gz", "."), ("test", ".", "", "raw")]
)
def test_idx_files(tmp_path: Path, test_prefix: str, separator: str, suffix: str, inner: str) -> None:
    (tmp_path / inner).mkdir(exist_ok=True)
    names = [
        f"{prefix}-{kind.replace('-', separator)}-ubyte{suffix}"
        for prefix in ("train", test_prefix)
        for kind in ("images-idx3", "labels-idx1")
    ]
    made = [pixels(3, 4, 6), np.array([1, 0, 1], np.uint8), pixels(2, 4, 6), np.array([2, 0], np.uint8)]
    for name, array in zip(names, made, strict=True):
        write_idx(tmp_path / inner / name, array)
    train, test = load(tmp_path, "train"), load(tmp_path, "test")
    assert np.array_equal(train.images[..., 0], made[0])
    assert np.array_equal(test.images[..., 0], made[2])
    assert (train.labels.tolist(), test.labels.tolist()) == ([1, 0, 1], [2, 0])
    assert train.class_names == test.class_names == ("0", "1", "2")
    assert load(tmp_path, "test", (2, 3)).image_shape == (2, 3, 1)
    train.images[0] = 0  # the array is the caller's own


def test_damaged_idx_files_are_refused(tmp_path: Path) -> None:
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte.gz"
    write_idx(labels, np.array([0, 1], np.uint8))
    refused(tmp_path, "pairs")
    write_idx(images, pixels(2, 4, 4))
    assert len(load(tmp_path, "train")) == 2
    refused(tmp_path, "no test split", split="test")

    whole = images.read_bytes()
    for damaged in (whole[:-1], whole + b"x", whole[:9]):
        images.write_bytes(damaged)
        refused(images.parent, images.name, "download it again")
    images.write_bytes(b"\x00\x00\x0d\x03" + whole[4:])
    refused(tmp_path, "magic 00000d03")
    images.write_bytes(whole[:4] + b"\xff" * 12)
    refused(tmp_path, images.name, "may be taken")
    write_idx(images, pixels(3, 4, 4))
    refused(tmp_path, "one for each of 3")
    labels.write_bytes(labels.read_bytes()[:-9])
    refused(tmp_path, labels.name, "download it again")
