"""Loaders on small made-up data: every layout, every refusal; normalisation and resizing."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image

from fedmpq.data.dataset import DataError, Dataset, resize
from fedmpq.data.open_source import load, splits

RNG = np.random.default_rng(7)
small_images = hnp.arrays(
    np.uint8, st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3]))
)


def pixels(*shape: int) -> NDArray[np.uint8]:
    return RNG.integers(0, 256, shape, np.uint8)


def save_image(path: Path, array: NDArray[np.uint8], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path, **options)
    return path


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    header = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(header + array.tobytes())


def refused(path: Path, *words: str, split: Any = "train", size: Any = None) -> None:
    """Loading fails with one line that names the path and all the words."""
    with pytest.raises(DataError) as caught:
        load(path, split, size)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message, message


# The data set itself


def test_subset_keeps_order_and_classes() -> None:
    data = Dataset(pixels(4, 2, 2, 1), np.array([0, 1, 1, 0]), ("a", "b"), (("x.jpg", "broken"),))
    part = data.subset([3, 1])
    assert np.array_equal(part.images, data.images[[3, 1]])
    assert part.labels.tolist() == [0, 1]
    assert (part.class_names, part.skipped) == (data.class_names, data.skipped)
    assert len(data.subset([])) == 0
    assert data.image_shape == (2, 2, 1)


def test_subset_refuses_a_mask() -> None:
    data = Dataset(pixels(2, 2, 2, 1), np.array([0, 1]), ("a", "b"))
    with pytest.raises(DataError, match="flatnonzero"):
        data.subset(np.array([True, False]))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (np.zeros((2, 2, 2, 1), np.float32), np.zeros(2, np.int64), "images are float32"),
        (np.zeros((2, 2, 2), np.uint8), np.zeros(2, np.int64), "must be uint8 of shape"),
        (np.zeros((2, 2, 2, 1), np.uint8), np.zeros(3, np.int64), "one for each of 2"),
        (np.zeros((2, 2, 2, 1), np.uint8), np.zeros(2, np.int32), "must be int64"),
        (np.zeros((2, 2, 2, 1), np.uint8), np.array([0, 2]), "0..1"),
        (np.zeros((2, 2, 2, 1), np.uint8), np.array([-1, 0]), "0..1"),
    ],
)
def test_data_set_refuses_inconsistent_arrays(images: Any, labels: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Dataset(images, labels, ("a", "b"))


@given(small_images)
def test_normalisation_is_the_mean_and_deviation_of_all_pixels(images: NDArray[np.uint8]) -> None:
    scale, zero_point = Dataset(images, np.zeros(len(images), np.int64), ("a",)).normalisation()
    values = images.astype(np.float64)
    assert abs(zero_point - values.mean()) <= 0.5 + 1e-9
    assert scale == float(np.float32(scale))
    assert scale == (1 / 64 if values.min() == values.max() else pytest.approx(1 / values.std(), rel=1e-6))


def test_normalisation_counts_across_pieces() -> None:
    images = pixels(5, 700, 700, 1)  # more than one piece of 2^20 pixels
    scale, zero_point = Dataset(images, np.zeros(5, np.int64), ("a",)).normalisation()
    assert scale == pytest.approx(1 / images.std(), rel=1e-6)
    assert zero_point == round(float(images.mean()))


def test_normalisation_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="at least one image"):
        Dataset(pixels(0, 2, 2, 1), np.zeros(0, np.int64), ("a",)).normalisation()


# Resizing


@given(small_images)
def test_halving_is_the_rounded_mean_of_four(small: NDArray[np.uint8]) -> None:
    height, width = small.shape[1:3]
    images = np.repeat(np.repeat(small, 2, axis=1), 2, axis=2)
    images[:, 1::2, ::2] = 255 - images[:, 1::2, ::2]
    halved = resize(images, (height, width))
    for n, y, x, c in np.ndindex(*small.shape):
        four = images[n, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2, c]
        assert halved[n, y, x, c] == int(float(four.sum()) / 4 + 0.5)


@given(small_images, st.integers(1, 7), st.integers(1, 7))
def test_resizing_keeps_the_range_and_flat_colours(
    images: NDArray[np.uint8], height: int, width: int
) -> None:
    out = resize(images, (height, width))
    assert out.shape == (len(images), height, width, images.shape[3])
    for n, c in np.ndindex(len(images), images.shape[3]):
        assert (
            images[n, :, :, c].min()
            <= out[n, :, :, c].min()
            <= out[n, :, :, c].max()
            <= images[n, :, :, c].max()
        )


def test_a_third_is_the_mean_of_nine() -> None:
    images = pixels(3, 12, 9, 3)
    exact = images.reshape(3, 4, 3, 3, 3, 3).mean(axis=(2, 4))
    # BOX rounds once along each axis.
    assert np.abs(resize(images, (4, 3)) - exact).max() <= 1.0


@pytest.mark.parametrize("size", [0, -3, (4, 0), 5000])
def test_impossible_sizes_are_refused(size: Any) -> None:
    with pytest.raises(DataError, match=r"1\.\.4096"):
        resize(pixels(1, 4, 4, 1), size)


# Folders


def test_class_folders_in_sorted_order(tmp_path: Path) -> None:
    made = {name: pixels(4, 5, 3) for name in ("dog/b.png", "dog/a.PNG", "cat/z.bmp", "cat/.hidden.png")}
    for name, array in made.items():
        save_image(tmp_path / name, array)
    (tmp_path / "dog" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache").mkdir()
    data = load(str(tmp_path), "train")
    assert data.class_names == ("cat", "dog")
    assert data.labels.tolist() == [0, 1, 1]
    assert np.array_equal(data.images, np.stack([made["cat/z.bmp"], made["dog/a.PNG"], made["dog/b.png"]]))
    assert data.skipped == ()
    assert splits(tmp_path) == ("train",)
    refused(tmp_path, "no test split", split="test")


@pytest.mark.parametrize("test_folder", ["test", "val"])
def test_split_folders_share_the_training_classes(tmp_path: Path, test_folder: str) -> None:
    for name in ("a", "b", "c"):
        save_image(tmp_path / "train" / name / "0.png", pixels(4, 4, 3))
    (tmp_path / "train" / "empty").mkdir()
    last = pixels(4, 4, 3)
    save_image(tmp_path / test_folder / "c" / "0.png", last)
    data = load(tmp_path, "test")
    assert splits(tmp_path) == ("train", "test")
    assert data.class_names == ("a", "b", "c", "empty") == load(tmp_path, "train").class_names
    assert data.labels.tolist() == [2]
    assert np.array_equal(data.images[0], last)


def test_test_class_without_training_folder_is_refused(tmp_path: Path) -> None:
    save_image(tmp_path / "train" / "a" / "0.png", pixels(4, 4, 3))
    save_image(tmp_path / "test" / "b" / "0.png", pixels(4, 4, 3))
    refused(tmp_path, "class b", "even if empty", split="test")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        save_image(tmp_path / name / "0.png", pixels(4, 4, 3))
    assert load(tmp_path, "train").class_names == ("bus", "train")


def test_only_a_test_folder(tmp_path: Path) -> None:
    save_image(tmp_path / "test" / "b" / "0.png", pixels(4, 4, 3))
    assert load(tmp_path, "test").class_names == ("b",)
    refused(tmp_path, "no train split", "only test")


def test_tiny_imagenet(tmp_path: Path) -> None:
    made = {f"{wnid}_{n}": pixels(4, 4, 3) for wnid in ("n02", "n01") for n in range(2)}
    for name, array in made.items():
        save_image(tmp_path / "train" / name[:3] / "images" / f"{name}.png", array)
    for n in range(3):
        save_image(tmp_path / "val" / "images" / f"val_{n}.png", made["n02_0"])
    (tmp_path / "val" / "val_annotations.txt").write_text(
        "val_0.png\tn02\t0\t0\t9\t9\nval_1.png\tn01\t0\t0\t9\t9"
    )
    save_image(tmp_path / "test" / "images" / "test_0.png", made["n02_0"])  # the real one is unlabelled, too
    train, test = load(tmp_path, "train"), load(tmp_path, "test")
    assert train.class_names == test.class_names == ("n01", "n02")
    assert train.labels.tolist() == [0, 0, 1, 1]
    assert np.array_equal(train.images, np.stack([made[name] for name in sorted(made)]))
    assert test.labels.tolist() == [1, 0]
    assert test.skipped == (
        (str(tmp_path / "val" / "images" / "val_2.png"), "not listed in val_annotations.txt"),
    )


def test_tiny_imagenet_with_a_broken_list(tmp_path: Path) -> None:
    save_image(tmp_path / "train" / "n01" / "images" / "0.png", pixels(4, 4, 3))
    save_image(tmp_path / "val" / "images" / "0.png", pixels(4, 4, 3))
    (tmp_path / "val" / "val_annotations.txt").write_text("0.png\tn01\nnonsense\n")
    refused(tmp_path, "line 2", split="test")


def test_broken_images_are_skipped_and_counted(tmp_path: Path) -> None:
    good = [save_image(tmp_path / "a" / f"{n}.jpg", pixels(16, 16, 3)) for n in range(6)]
    whole = good[1].read_bytes()
    good[1].write_bytes(whole[: len(whole) // 2])
    good[3].write_bytes(b"")
    good[4].write_bytes(b"\xff\xd8 not a jpeg at all")
    data = load(tmp_path, "train")
    assert len(data) == 3
    assert [path for path, _ in data.skipped] == [str(good[n]) for n in (1, 3, 4)]
    assert "truncated" in data.skipped[0][1].lower()
    assert all(reason and "\n" not in reason and str(tmp_path) not in reason for _, reason in data.skipped)
    assert np.array_equal(data.images[1], np.asarray(Image.open(good[2])))


def test_mostly_broken_folder_is_refused(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "0.png", pixels(4, 4, 3))
    for n in (1, 2):
        (tmp_path / "a" / f"{n}.png").write_bytes(b"nonsense")
    refused(tmp_path, "2 of 3 images", "1.png")


def test_no_readable_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.png").write_bytes(b"nonsense")
    refused(tmp_path, "no readable image", "cannot identify")


def test_odd_sizes_are_skipped_unless_a_size_is_given(tmp_path: Path) -> None:
    first, other = pixels(4, 6, 3), pixels(8, 12, 3)
    save_image(tmp_path / "a" / "0.png", first)
    save_image(tmp_path / "a" / "1.png", other)
    data = load(tmp_path, "train")
    assert len(data) == 1
    assert data.skipped[0][1] == "8x12, not 4x6 as the first: give a size"
    resized = load(tmp_path, "train", (4, 6))
    assert resized.skipped == ()
    assert np.array_equal(resized.images, np.stack([first, resize(other[None], (4, 6))[0]]))


def test_both_splits_take_the_size_of_the_first_training_image(tmp_path: Path) -> None:
    save_image(tmp_path / "train" / "a" / "0.png", pixels(4, 4, 3))
    save_image(tmp_path / "test" / "a" / "0.png", pixels(5, 5, 3))
    refused(tmp_path, "5x5, not 4x4", "give a size", split="test")
    assert load(tmp_path, "test", 3).image_shape == (3, 3, 3)


def test_grey_only_if_all_are(tmp_path: Path) -> None:
    grey = pixels(4, 4)
    save_image(tmp_path / "train" / "a" / "0.png", grey)
    save_image(tmp_path / "test" / "a" / "0.png", grey)
    assert load(tmp_path, "train").image_shape == (4, 4, 1)
    assert np.array_equal(load(tmp_path, "train").images[0, :, :, 0], grey)
    save_image(tmp_path / "train" / "a" / "1.png", pixels(4, 4, 3))
    for split in splits(tmp_path):
        data = load(tmp_path, split)
        assert np.array_equal(data.images[0], np.repeat(grey[:, :, None], 3, axis=2))


def test_transparency_and_palettes_become_rgb(tmp_path: Path) -> None:
    colour = pixels(4, 4, 4)
    save_image(tmp_path / "a" / "0.png", colour)
    Image.fromarray(pixels(4, 4, 3)).convert("P").save(tmp_path / "a" / "1.png")
    data = load(tmp_path, "train")
    assert data.images.shape == (2, 4, 4, 3)
    assert np.array_equal(data.images[0], colour[:, :, :3])


def test_deep_images_are_skipped(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "0.png", pixels(4, 4))
    Image.fromarray(RNG.integers(0, 65536, (4, 4), np.uint16)).save(tmp_path / "a" / "1.png")
    data = load(tmp_path, "train")
    assert len(data) == 1
    assert "8 bits" in data.skipped[0][1]


def test_a_large_photo_is_reduced(tmp_path: Path) -> None:
    ramp = np.repeat(np.arange(512, dtype=np.uint16)[None, :] // 2, 512, axis=0).astype(np.uint8)
    save_image(tmp_path / "a" / "0.jpg", np.stack([ramp] * 3, axis=2), quality=95)
    row = load(tmp_path, "train", 8).images[0, 4, :, 0].astype(int)
    assert np.abs(row - (16 + 32 * np.arange(8))).max() <= 2


def test_decoding_spans_several_chunks(tmp_path: Path) -> None:
    array = np.arange(600, dtype=np.uint16)
    for n in array:
        save_image(tmp_path / "a" / f"{n:03}.bmp", np.array([[n // 256, n % 256]], np.uint8))
    (tmp_path / "a" / "300.bmp").write_bytes(b"nonsense")
    images = load(tmp_path, "train").images.astype(np.uint16)
    assert np.array_equal(images[:, 0, 0, 0] * 256 + images[:, 0, 1, 0], np.delete(array, 300))


def test_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_image(tmp_path / "a" / "0.png", pixels(4, 4, 3))
    monkeypatch.setattr("os.sysconf", lambda name: 6)
    refused(tmp_path, "4x4", "give a smaller size")


def test_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no such file or folder")
    refused(tmp_path, "no data set", "<class>/*.jpg")
    (tmp_path / "train").mkdir()
    save_image(tmp_path / "train" / "0.png", pixels(4, 4, 3))
    refused(tmp_path, "no data set", "train/<class>")
    (tmp_path / "a").mkdir()
    refused(tmp_path / "a", "no data set")
    (tmp_path / "classes" / "one").mkdir(parents=True)
    refused(tmp_path / "classes", "no images in its class folders", ".png")


# Arrays


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
        (np.full((1, 2, 2), np.nan, np.float32), np.zeros(1, np.int64), ["images", "NaN"]),
        (np.full((1, 2, 2), 1.5, np.float32), np.zeros(1, np.int64), ["0..1", "rescale"]),
        (np.full((1, 2, 2), -0.5), np.zeros(1, np.int64), ["0..1", "rescale"]),
        (np.zeros((1, 2, 2), np.int32), np.zeros(1, np.int64), ["int32", "uint8"]),
        (np.zeros((1, 3, 32, 32), np.uint8), np.zeros(1, np.int64), ["(1, 3, 32, 32)", "transpose"]),
        (np.zeros((4,), np.uint8), np.zeros(4, np.int64), ["(N, H, W)"]),
        (np.zeros((1, 2, 2), np.uint8), np.zeros(2, np.int64), ["one for each of 1"]),
        (np.zeros((1, 2, 2), np.uint8), np.zeros(1, np.float32), ["float32", "integers"]),
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
    refused(path, "no images+labels")
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
    refused(tmp_path, images.name, "download it again")
    write_idx(images, pixels(3, 4, 4))
    refused(tmp_path, "one for each of 3")
    labels.write_bytes(labels.read_bytes()[:-9])
    refused(tmp_path, labels.name, "download it again")
