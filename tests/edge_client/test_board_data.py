"""A board's samples under the model's labels and in the model's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.data import image_folders
from fedmpq.data.dataset import DataError, resize
from fedmpq.data.fitting import Form
from fedmpq.data.photo import read_photo
from fedmpq.edge_client.board_data import MAX_EVALUATED, NamedData
from tests.data.files import pixels, save_image

_save: Any = np.savez  # its stub takes every keyword for the one flag it has
DIGITS = tuple(map(str, range(10)))


def test_models_are_measured_on_test_data_or_a_share(tmp_path: Path) -> None:
    count = 2 * MAX_EVALUATED + 1
    train = {"x_train": np.zeros((count, 4, 4), np.uint8), "y_train": np.arange(count) % 10}
    test = {"x_test": np.ones((7, 4, 4), np.uint8), "y_test": np.arange(7)}
    _save(str(tmp_path / "train.npz"), **train)
    _save(tmp_path / "test.npz", **test)
    form, names = Form(4, 4, 1), DIGITS
    source = NamedData(str(tmp_path / "train.npz"))
    assert source.samples == count
    data = source.load(form, names)
    assert (len(data.train), len(data.evaluation)) == (count, MAX_EVALUATED)
    assert set(data.evaluation.labels.tolist()) == set(range(10))
    other = NamedData(str(tmp_path / "train.npz"), str(tmp_path / "test.npz")).load(form, names)
    assert len(other.evaluation) == 7
    plain = NamedData(str(tmp_path / "train.npz"), str(tmp_path / "train.npz")).load(Form(2, 2, 3), names)
    assert len(plain.evaluation) == MAX_EVALUATED
    assert plain.train.image_shape == (2, 2, 3)


def test_photos_are_counted_at_first_and_read_for_a_model(tmp_path: Path) -> None:
    for n, name in enumerate(("bee", "bee", "emu")):
        save_image(tmp_path / name / f"{n}.png", pixels(5 + n, 9, 3))
    (tmp_path / "bee" / "broken.png").write_bytes(b"nonsense")
    source = NamedData(str(tmp_path), skip=["emu"])
    assert source.samples == 4
    train = source.load(Form(3, 3, 1), ("ant", "bee")).train
    assert train.image_shape == (3, 3, 1)
    assert train.labels.tolist() == [1, 1]
    assert [path for path, _ in train.skipped] == [str(tmp_path / "bee" / "broken.png")]
    with pytest.raises(DataError, match=r"class 'emu' is none of the model's 2 classes.*--skip-class"):
        NamedData(str(tmp_path)).load(Form(3, 3, 1), ("ant", "bee"))


def test_too_few_samples_are_told_at_the_start_and_after_reading(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "0.png", pixels(4, 4, 3))
    with pytest.raises(DataError, match="has 1 sample; training needs at least 2"):
        NamedData(str(tmp_path))
    (tmp_path / "a" / "1.png").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="1 samples can be used, training needs at least 2"):
        NamedData(str(tmp_path)).load(Form(3, 3, 1), ("a",))


def test_a_class_to_leave_out_must_be_there(tmp_path: Path) -> None:
    for n in range(2):
        save_image(tmp_path / "a" / f"{n}.png", pixels(4, 4, 3))
    with pytest.raises(DataError, match="class 'b' is to be left out, and is none of this data's 1"):
        NamedData(str(tmp_path), skip=["b"]).load(Form(3, 3, 1), ("a",))


def test_new_and_changed_files_are_noticed_and_only_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        save_image(tmp_path / "a" / f"{n}.png", pixels(6, 6, 3))
    source, form = NamedData(str(tmp_path)), Form(3, 3, 3)
    source.load(form, ("a",))
    assert not source.has_changed()
    new, changed = pixels(6, 6, 3), pixels(8, 8, 3)
    save_image(tmp_path / "a" / "3.png", new)
    save_image(tmp_path / "a" / "1.png", changed)
    (tmp_path / ".cache").mkdir()
    assert source.has_changed()
    read: list[str] = []

    def counted(path: str, *arguments: Any) -> Any:
        read.append(Path(path).name)
        return read_photo(path, *arguments)

    monkeypatch.setattr(image_folders, "read_photo", counted)
    train = source.load(form, ("a",)).train
    assert sorted(read) == ["1.png", "3.png"]
    assert np.array_equal(train.images[3], resize(new[None], 3)[0])
    assert np.array_equal(train.images[1], read_photo(str(tmp_path / "a" / "1.png"), (3, 3), 3))
    assert np.array_equal(train.images, NamedData(str(tmp_path)).load(form, ("a",)).train.images)
    assert not source.has_changed()
    (tmp_path / "a" / "0.png").unlink()
    assert source.has_changed()
    assert len(source.load(form, ("a",)).train) == 3


def test_an_archive_that_is_saved_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    _save(path, samples=np.zeros((4, 2, 5), np.float32), labels=np.zeros(4, np.int64))
    source, form = NamedData(str(path)), Form(1, 5, 2)
    assert source.bounds is not None
    assert len(source.load(form, ("a",)).train) == 4
    _save(path, samples=np.zeros((7, 2, 5), np.float32), labels=np.zeros(7, np.int64))
    assert source.has_changed()
    assert len(source.load(form, ("a",)).train) == 7
