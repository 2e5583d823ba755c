"""One photo, one way to read it: against obvious references, whatever its format, colours and orientation."""

from __future__ import annotations

import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from fedmpq.data import photo
from fedmpq.data.dataset import DataError, Dataset
from fedmpq.data.fitting import Form, fitted
from fedmpq.data.open_source import load, open_source
from fedmpq.data.photo import is_photo, read_photo
from fedmpq.system import memory
from tests.data.files import pixels, save_image
from tests.data.phone_photos import phone_folder

TURNS: dict[int, Any] = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}
"""What a viewer shows of stored pixels, by EXIF orientation."""


def area_mean(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float64]:
    """The mean of the old pixels whose centres lie in each new pixel's area; slow, in fractions."""

    def inside(old: int, new: int) -> list[list[int]]:
        step = Fraction(old, new)
        centres = [cell + Fraction(1, 2) for cell in range(old)]
        return [[n for n, at in enumerate(centres) if k * step < at <= (k + 1) * step] for k in range(new)]

    rows, columns = inside(image.shape[0], height), inside(image.shape[1], width)
    return np.array([[image[np.ix_(row, column)].mean(axis=(0, 1)) for column in columns] for row in rows])


@pytest.mark.parametrize("ending", ["png", "tiff", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_upright(tmp_path: Path, orientation: int, ending: str) -> None:
    array = pixels(5, 7, 3)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if ending == "webp" else {}
    path = save_image(tmp_path / f"a.{ending}", array, exif=exif, **options)
    assert np.array_equal(read_photo(str(path), None, 3), TURNS[orientation](array))
    folder = save_image(tmp_path / "folder" / "a" / f"a.{ending}", array, exif=exif, **options).parents[1]
    assert np.array_equal(load(folder, "train").images[0], TURNS[orientation](array))


@settings(max_examples=25, deadline=None)
@given(
    st.tuples(st.integers(3, 24), st.integers(3, 24)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.data(),
)
def test_resizing_is_the_mean_of_the_area(
    tmp_path_factory: pytest.TempPathFactory, old: tuple[int, int], new: tuple[int, int], data: Any
) -> None:
    """Within one grey level where it shrinks: Pillow rounds after each of its two passes."""
    new = min(new[0], old[0]), min(new[1], old[1])
    # A centre on the border between two new pixels belongs to either, as rounding has it.
    assume(
        not any(
            (k * Fraction(a, b)) % 1 == Fraction(1, 2)
            for a, b in zip(old, new, strict=True)
            for k in range(b)
        )
    )
    random = np.random.default_rng(data.draw(st.integers(0, 99)))
    array = random.integers(0, 256, (*old, 3), np.uint8)
    path = save_image(tmp_path_factory.mktemp("photo") / "a.png", array)
    found = read_photo(str(path), new, 3)
    assert np.abs(found - area_mean(array, *new)).max() <= 1.01


def test_a_large_jpeg_is_the_mean_of_all_its_pixels(tmp_path: Path) -> None:
    """A decoder that shrinks while it decodes would be up to 12 grey levels off."""
    array = np.repeat(np.repeat(pixels(64, 64, 3), 4, axis=0), 4, axis=1)
    path = save_image(tmp_path / "a.jpg", array, quality=60)
    with Image.open(path) as opened:
        decoded = np.asarray(opened).astype(np.float64)
    mean = decoded.reshape(8, 32, 8, 32, 3).mean(axis=(1, 3))
    assert np.abs(read_photo(str(path), (8, 8), 3) - mean).max() <= 1.01


def test_sixteen_bits_become_their_upper_eight(tmp_path: Path) -> None:
    deep = np.random.default_rng(0).integers(0, 65536, (6, 5)).astype(np.uint16)
    for ending in ("png", "tiff"):
        path = tmp_path / f"a.{ending}"
        Image.fromarray(deep).save(path)
        assert np.array_equal(read_photo(str(path), None, 1)[..., 0], deep >> 8)
        assert np.array_equal(read_photo(str(path), None, 3)[..., 2], deep >> 8)


def test_colours_of_every_mode(tmp_path: Path) -> None:
    colour = pixels(6, 5, 4)
    rgb = Image.fromarray(colour[..., :3])
    luma = (colour[..., :3].astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32) + 32768) >> 16
    save_image(tmp_path / "alpha.png", colour)
    assert np.array_equal(read_photo(str(tmp_path / "alpha.png"), None, 3), colour[..., :3])
    assert np.array_equal(read_photo(str(tmp_path / "alpha.png"), None, 1)[..., 0], luma)
    palette = rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=256)
    palette.save(tmp_path / "palette.gif")
    with Image.open(tmp_path / "palette.gif") as opened:
        shown = np.asarray(opened.convert("RGB"))
    assert np.array_equal(read_photo(str(tmp_path / "palette.gif"), None, 3), shown)
    rgb.convert("CMYK").save(tmp_path / "print.jpg", quality=95)
    assert read_photo(str(tmp_path / "print.jpg"), None, 3).shape == (6, 5, 3)
    rgb.convert("1").save(tmp_path / "bits.png")
    assert set(np.unique(read_photo(str(tmp_path / "bits.png"), None, 1))) <= {0, 255}
    rgb.convert("L").save(tmp_path / "grey.png")
    grey = read_photo(str(tmp_path / "grey.png"), None, 3)
    assert np.array_equal(grey[..., 0], luma)
    assert np.array_equal(grey[..., 1], grey[..., 2])


def test_of_a_moving_picture_the_first_frame_counts(tmp_path: Path) -> None:
    frames = [Image.fromarray(np.full((4, 4), value, np.uint8)) for value in (10, 200)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert set(np.unique(read_photo(str(tmp_path / "a.gif"), None, 1))) == {10}


def test_heic_is_read_upright(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    pixels = np.zeros((32, 48, 3), np.uint8)
    pixels[:, :24, 0] = 200
    heif.register_heif_opener()
    Image.fromarray(pixels).save(tmp_path / "a.heic", quality=-1)
    found = read_photo(str(tmp_path / "a.heic"), None, 3)
    assert found.shape == (32, 48, 3)
    assert np.abs(found.astype(int) - pixels).max() < 12
    assert is_photo(tmp_path / "a.heic")


def test_without_its_reader_the_way_out_of_heic_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photo, "_known_formats", lambda: frozenset({"JPEG", "PNG"}))
    (tmp_path / "a.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    with pytest.raises(ValueError, match="pip install pillow-heif"):
        read_photo(str(tmp_path / "a.HEIC"), None, 3)


def test_floats_and_other_numbers_of_channels_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((3, 3), np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match="floats, whose range nobody knows"):
        read_photo(str(tmp_path / "a.tiff"), None, 3)
    with pytest.raises(DataError, match=r"1 channel \(grey\) or 3 \(colour\), not 4"):
        read_photo(str(tmp_path / "a.tiff"), None, 4)


def test_a_photo_that_needs_more_than_the_memory_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, side in enumerate((4, 4, 40)):
        save_image(tmp_path / "a" / f"{n}.png", pixels(side, side, 3))
    monkeypatch.setattr(memory, "_given", 8 * 40 * 40 - 1)
    data = open_source(tmp_path).load("train", (4, 4))
    assert len(data) == 2
    assert "40x40 pixels need 12.5 KiB of memory" in data.skipped[0][1]


def test_a_folder_from_phones_is_read_in_the_models_form(tmp_path: Path) -> None:
    """The same pixels one by one, in a folder, and as arrays that are fitted."""
    folder = phone_folder(tmp_path, 8, 3)
    for form in (Form(8, 6, 3), Form(5, 5, 1)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data = open_source(folder).load_as("train", form)  # type: ignore[attr-defined]
        assert len(data) == 16
        assert [Path(path).name for path, _ in data.skipped] == ["IMG_9999.jpg"]
        names = sorted(path for path in folder.rglob("IMG*") if path.name != "IMG_9999.jpg")
        for path, image in zip(names, data.images, strict=True):
            assert np.array_equal(read_photo(str(path), form.size, form.channels), image)
            own = read_photo(str(path), None, 3)
            alone = Dataset(own[None], np.zeros(1, np.int64), ("a",))
            assert np.array_equal(fitted(alone, form).images[0], image)


def test_the_documented_snippet_reads_the_same_pixels(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    lines = page.split("## Running a file in Python")[1].splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("    def read_pixels"))
    end = next(n for n in range(start, len(lines)) if not lines[n])
    imports = ["import numpy as np", "from PIL import Image, ImageOps"]
    names: dict[str, Any] = {}
    exec("\n".join([*imports, *(line[4:] for line in lines[start:end])]), names)
    folder = phone_folder(tmp_path, 8, 5)
    save_image(folder / "day" / "half.png", pixels(16, 12, 3))
    for path in folder.rglob("*.*"):
        if path.name != "IMG_9999.jpg":
            for height, width, channels in ((8, 6, 3), (8, 6, 1)):
                documented = names["read_pixels"](path, height, width, channels)[0]
                assert np.array_equal(documented, read_photo(str(path), (height, width), channels)), path
