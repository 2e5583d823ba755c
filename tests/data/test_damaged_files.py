"""Damaged data files: each is read, or refused as a DataError that names it, whatever the libraries raise."""

from __future__ import annotations

import gzip
import io
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.data.dataset import DataError
from fedmpq.data.open_source import load
from fedmpq.system import memory
from tests.damaged import damaged
from tests.data.files import pixels, refused, write_idx


def archive(compressed: bool) -> bytes:
    file = io.BytesIO()
    arrays: dict[str, Any] = {"images": pixels(4, 3, 3, 1), "labels": np.array([0, 1, 1, 0])}
    (np.savez_compressed if compressed else np.savez)(file, **arrays, class_names=np.array(["cat", "dog"]))
    return file.getvalue()


def npy(header: str, data: bytes = b"", version: tuple[int, int] = (1, 0)) -> bytes:
    text = header.encode() + b"\n"
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + data


def zipped(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, data in members.items():
            made.writestr(f"{name}.npy", data)
    return file.getvalue()


@pytest.fixture
def small_memory() -> Iterator[None]:
    memory.give_memory(1 << 20)
    yield
    memory.give_memory(None)


def read(path: Path) -> None:
    """Loads it; what is refused is refused in one line that names the file."""
    message = ""
    try:
        load(path if path.suffix == ".npz" else path.parent, "train")
    except DataError as error:
        message = str(error)
    assert not message or str(path.parent) in message
    assert "\n" not in message


@given(st.sampled_from([archive(False), archive(True)]).flatmap(damaged))
def test_a_damaged_npz_is_read_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "board.npz"
        path.write_bytes(data)
        read(path)


@given(st.data(), st.booleans())
def test_a_damaged_idx_is_read_or_refused(data: st.DataObject, packed: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder) / "train-images-idx3-ubyte"
        write_idx(images, np.arange(60, dtype=np.uint8).reshape(5, 4, 3))
        write_idx(Path(folder) / "train-labels-idx1-ubyte", np.array([0, 1, 1, 0, 2], np.uint8))
        whole = images.read_bytes()
        if packed:
            images.unlink()
            images, whole = images.with_name(f"{images.name}.gz"), gzip.compress(whole, mtime=0)
        images.write_bytes(data.draw(damaged(whole)))
        read(images)


DEEP = "{'descr': '|u1', 'fortran_order': False, 'shape': " + "(" * 300 + ")" * 300 + "}"
HEADERS = {
    "beyond every address": f"{{'descr': '|u1', 'fortran_order': False, 'shape': (2, {2**63 - 1}, 3)}}",
    "a length that no machine has": "{'descr': '|u1', 'fortran_order': False, 'shape': (10**9,)}",
    "nesting": DEEP,
    "more than follows": "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 200, 200)}",
    "negative lengths": "{'descr': '|u1', 'fortran_order': False, 'shape': (-2, -3, 3)}",
    "objects": "{'descr': '|O', 'fortran_order': False, 'shape': (2, 3, 3)}",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: str) -> None:
    labels = io.BytesIO()
    np.save(labels, np.array([0, 1]))
    (tmp_path / "board.npz").write_bytes(zipped(images=npy(header, b"x" * 18), labels=labels.getvalue()))
    refused(tmp_path / "board.npz", "images")


def test_an_npz_that_needs_more_than_is_given_is_refused_before_it_is_read(
    tmp_path: Path, small_memory: None
) -> None:
    """Zeros compress a thousandfold: 6 MB of file may be 6 GB of images."""
    path = tmp_path / "board.npz"
    np.savez_compressed(path, images=np.zeros((400, 64, 64, 1), np.uint8), labels=np.zeros(400, np.int64))
    assert path.stat().st_size < 10_000
    refused(path, "array images needs 1.56 MiB of memory, 1 MiB may be taken")


def test_an_idx_that_needs_more_than_is_given_is_refused_before_it_is_read(
    tmp_path: Path, small_memory: None
) -> None:
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.zeros((400, 64, 64), np.uint8))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(400, np.uint8))
    refused(tmp_path, "train-images-idx3-ubyte.gz", "needs 3.12 MiB of memory, 1 MiB may be taken")


@pytest.mark.parametrize(("at", "what"), [((6, 8), 1), ((8, 10), 99)], ids=["encrypted", "packed by others"])
def test_an_archive_that_zipfile_does_not_read_is_refused(
    tmp_path: Path, at: tuple[int, int], what: int
) -> None:
    """zipfile raises RuntimeError and NotImplementedError on them; both headers of each member say so."""
    data = bytearray(archive(True))
    for magic, offset in ((b"PK\3\4", at[0]), (b"PK\1\2", at[1])):
        place = data.find(magic)
        while place >= 0:
            data[place + offset] = what
            place = data.find(magic, place + 1)
    (tmp_path / "board.npz").write_bytes(data)
    refused(tmp_path / "board.npz", "save it")


def test_strange_class_names_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "board.npz"
    np.savez(path, images=pixels(2, 3, 3), labels=np.array([0, 1]), class_names=np.zeros((2, 2)))
    refused(path, "class_names is float64 of 4 elements")
