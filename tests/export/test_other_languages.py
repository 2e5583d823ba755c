"""The examples in C++, Java and Kotlin: photos resized to the bit as in training, and files that are run.

What needs a header or a compiler that is not there is skipped; the syntax of every file is always checked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tree_sitter_cpp
import tree_sitter_java
import tree_sitter_kotlin
from PIL import Image
from tree_sitter import Language, Parser

import fedmpq
from fedmpq.data.dataset import resize
from tests.export.models import deployed

EXAMPLES = Path(__file__).parents[2] / "examples"
LANGUAGES = {
    ".h": tree_sitter_cpp,
    ".cpp": tree_sitter_cpp,
    ".java": tree_sitter_java,
    ".kt": tree_sitter_kotlin,
}
FILES = sorted(path for path in EXAMPLES.rglob("*") if path.suffix in LANGUAGES)
SIZES = [  # from, to
    ((9, 7), (9, 7)),
    ((18, 14), (9, 7)),
    ((18, 7), (9, 7)),
    ((31, 50), (8, 8)),
    ((5, 3), (12, 11)),
    ((1, 1), (2, 3)),
    ((97, 41), (32, 32)),
    ((6, 9), (1, 1)),
]
HEADERS = Path(os.environ.get("ONNXRUNTIME_INCLUDE", "/usr/include/onnxruntime"))
"""Where ONNX Runtime's C++ interface is looked for; its Python package has the library alone."""


def test_there_is_an_example_in_each_language() -> None:
    assert {path.suffix for path in FILES} == LANGUAGES.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_syntax_is_right(path: Path) -> None:
    parser = Parser(Language(LANGUAGES[path.suffix].language()))
    assert not parser.parse(path.read_bytes()).root_node.has_error
    assert parser.parse(path.read_bytes() + b"\n(;").root_node.has_error


CPP_MAIN = """
#include <cstdlib>
#include <iostream>
#include <iterator>
#include "pixels.h"

int main(int, char** given) {
  fedmpq::Image image(std::atoi(given[1]), std::atoi(given[2]), 3);
  std::cin.read(reinterpret_cast<char*>(image.bytes.data()), image.bytes.size());
  if (std::atoi(given[5]) == 1) image = fedmpq::grey(image);
  const auto out = fedmpq::resized(image, std::atoi(given[3]), std::atoi(given[4]));
  std::cout.write(reinterpret_cast<const char*>(out.bytes.data()), out.bytes.size());
}
"""

JAVA_MAIN = """
final class Main {
  public static void main(String[] given) throws java.io.IOException {
    int height = Integer.parseInt(given[0]);
    int width = Integer.parseInt(given[1]);
    byte[] bytes = System.in.readAllBytes();
    int[] packed = new int[height * width];
    for (int i = 0; i < packed.length; i++) {
      packed[i] = (bytes[3 * i] & 255) << 16 | (bytes[3 * i + 1] & 255) << 8 | bytes[3 * i + 2] & 255;
    }
    Pixels image = Pixels.ofColours(height, width, Integer.parseInt(given[4]), packed);
    System.out.write(image.resized(Integer.parseInt(given[2]), Integer.parseInt(given[3])).bytes);
    System.out.flush();
  }
}
"""


@pytest.fixture(scope="module")
def cpp_program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("cpp")
    (folder / "main.cpp").write_text(CPP_MAIN)
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    command += ["-I", str(EXAMPLES / "cpp"), str(folder / "main.cpp"), "-o", str(folder / "main")]
    subprocess.run(command, check=True)
    return [str(folder / "main")]


@pytest.fixture(scope="module")
def java_program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    if not shutil.which("javac"):
        pytest.skip("no Java compiler (javac) here")
    folder = tmp_path_factory.mktemp("java")
    (folder / "Main.java").write_text(JAVA_MAIN)
    sources = [str(folder / "Main.java"), str(EXAMPLES / "java" / "Pixels.java")]
    subprocess.run(["javac", "-Xlint:all", "-Werror", "-d", str(folder), *sources], check=True)
    return ["java", "-cp", str(folder), "Main"]


def _check_sizes(program: list[str]) -> None:
    random = np.random.default_rng(7)
    for old, new in SIZES:
        for channels in (3, 1):
            colours = random.integers(0, 256, (*old, 3), np.uint8)
            photo = colours if channels == 3 else np.asarray(Image.fromarray(colours).convert("L"))[..., None]
            expected = resize(photo[None], new)[0]
            command = [*program, *map(str, (*old, *new, channels))]
            given = subprocess.run(command, input=colours.tobytes(), capture_output=True, check=True).stdout
            assert given == expected.tobytes(), (old, new, channels)


def test_cpp_resizes_as_training_does(cpp_program: list[str]) -> None:
    _check_sizes(cpp_program)


def test_java_resizes_as_training_does(java_program: list[str]) -> None:
    _check_sizes(java_program)


def test_cpp_says_of_a_photo_what_predict_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not (HEADERS / "onnxruntime_cxx_api.h").exists():
        pytest.skip(f"no ONNX Runtime headers in {HEADERS}; name their folder in ONNXRUNTIME_INCLUDE")
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"))
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):
        (tmp_path / name).symlink_to(library)
    command = ["g++", "-std=c++17", str(EXAMPLES / "cpp" / "predict.cpp"), "-isystem", str(HEADERS)]
    command += [
        "-L",
        str(tmp_path),
        "-lonnxruntime",
        f"-Wl,-rpath,{tmp_path}",
        "-o",
        str(tmp_path / "predict"),
    ]
    subprocess.run(command, check=True)
    model = deployed("resnet8", [4])
    path = fedmpq.export(model, tmp_path / "model.onnx").path
    pixels = np.random.default_rng(3).integers(0, 256, (90, 70, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.ppm")
    said = subprocess.run(
        [str(tmp_path / "predict"), str(path), str(tmp_path / "photo.ppm")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    logits = model.logits(resize(pixels[None], (model.graph.input.height, model.graph.input.width)))[0]
    best = int(logits.argmax())
    share = np.exp(logits - logits.max())[best] / np.exp(logits - logits.max()).sum()
    assert said[0] == model.class_names[best]
    assert float(said[1]) == pytest.approx(float(share), abs=2e-6)
