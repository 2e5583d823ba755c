"""Folders of images: every layout, every refusal, and what becomes of odd images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedmpq.data.dataset import resize
from fedmpq.data.open_source import load, splits
from fedmpq.system import memory
from tests.data.files import pixels, refused, save_image


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


def test_images_of_floats_are_skipped(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "0.png", pixels(4, 4))
    Image.fromarray(np.zeros((4, 4), np.float32)).save(tmp_path / "a" / "1.tiff")
    data = load(tmp_path, "train")
    assert len(data) == 1
    assert "8 or 16 bits" in data.skipped[0][1]


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
    monkeypatch.setattr(memory, "_given", 47)
    refused(tmp_path, "4x4", "need 48 bytes of memory, 47 bytes may be taken: give a smaller size")


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
