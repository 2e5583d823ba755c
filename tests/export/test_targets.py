"""Targets by name, by the ending of a file, and of the user's own; what fits none is refused, not guessed."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmpq.cli.main import main
from fedmpq.export import exporting
from fedmpq.export.exporting import LabelledImages, export_model
from fedmpq.export.float_speed import SpeedMeter
from fedmpq.export.format import ExportError
from fedmpq.export.onnx.target import OnnxTarget
from fedmpq.export.targets import TARGETS, find_target, target_of
from fedmpq.export.verify import random_images, require_logits
from fedmpq.lab.checkpoint import save_checkpoint
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.simulation import prepare
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.export_formats import FORMATS, SUFFIXES
from tests.export.models import CLASSES, deployed

# A whole target in few lines: the file is the pickled model, which the integer forward runs.
OWN = """
from fedmpq.export.verify import require_logits


class Pickled:
    name = "pickled"
    suffix = ".garden"
    runtime = "no-such-distribution"

    def lower(self, model):
        import pickle
        return pickle.dumps(model)

    def run(self, path, threads=1):
        import pickle
        return pickle.loads(path.read_bytes())

    def verify(self, path, model, images):
        require_logits(self.name, model, images, self.run(path).logits(images))

    def float_twin(self, network):
        return lambda images: images.reshape(len(images), -1)[:, :7]


class Wrong(Pickled):
    def verify(self, path, model, images):
        require_logits(self.name, model, images, self.run(path).logits(images) + 1)


class Forgetful(Pickled):
    verify = property()


class Unending(Pickled):
    suffix = "garden"


class Nameless(Pickled):
    name = ""


class Onnx(Pickled):
    suffix = ".onnx"
"""


@pytest.fixture(scope="module")
def model() -> DeployedModel:
    return deployed("digits_cnn", (4, 3))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with targets in the current directory."""
    name = f"own_targets_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_names_and_endings_a_server_knows_are_the_targets() -> None:
    assert tuple(TARGETS) == FORMATS
    assert {name: target.suffix for name, target in TARGETS.items()} == SUFFIXES
    assert all(find_target(name) is target for name, target in TARGETS.items())


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("a.onnx", "onnx"),
        ("a.pte.xz", "executorch"),
        ("a.pte", "executorch-uncompressed"),
        ("a.pte.onnx", "onnx"),
    ],
)
def test_a_target_is_known_by_the_ending_of_a_file(name: str, target: str) -> None:
    assert target_of(Path("some.folder") / name).name == target


@pytest.mark.parametrize("name", ["garden", "garden.tflite", "garden.xz", "onnx", "garden.onnx.json"])
def test_another_ending_is_refused(name: str, model: DeployedModel, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=rf"'{name}' ends like the files of no export target; .*\.onnx"):
        export_model(model, tmp_path / name)
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("onx", r"no export target is called 'onx' \(did you mean 'onnx'\?\); take onnx, executorch"),
        ("Executorch", r"\(did you mean 'executorch'\?\)"),
        ("tflite", r"called 'tflite'; take onnx, executorch, .*, or your own as package.module:Class"),
        ("", r"no export target is called ''"),
        ("a:", r"no export target is called 'a:'"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        find_target(name)


def test_a_file_must_end_as_its_targets_do(model: DeployedModel, tmp_path: Path) -> None:
    with pytest.raises(
        ExportError, match=r"'onnx' end in \.onnx, and 'a.pte' does not; call it a\.pte\.onnx"
    ):
        export_model(model, tmp_path / "a.pte", target="onnx")
    assert not names(tmp_path)


# The user's own


def test_a_target_of_ones_own_writes_a_verified_file(own: str, model: DeployedModel, tmp_path: Path) -> None:
    images = random_images(model.graph, 5)
    tests = LabelledImages(images, model.predict(images))
    exported = export_model(
        model, tmp_path / "out" / "a.garden", target=f"{own}:Pickled", tests=tests, speed=SpeedMeter()
    )
    assert names(tmp_path / "out") == {"a.garden", "a.garden.json"}
    card = json.loads((tmp_path / "out" / "a.garden.json").read_text(encoding="utf-8"))
    assert card == json.loads(json.dumps(exported.card))
    assert (card["target"], card["suffix"]) == ("pickled", ".garden")
    assert card["runtime"] == "no-such-distribution"
    assert (card["accuracy"], card["verified_images"]) == (1.0, 16 + 5)
    assert card["speed"]["speedup"] == card["speed"]["speedup_over_fp32_no-such-distribution"]
    assert card["speed"]["fp32_onnxruntime_milliseconds"] > 0


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Wrong", "pickled computes 'fc.logits' of 'digits_cnn' otherwise than the integer reference"),
        (
            "Forgetful",
            "is a Forgetful that does not fit: its method 'verify' is missing; see .*target.Target",
        ),
        ("Unending", "suffix = 'garden' is no ending such as '.onnx'"),
        ("Nameless", "name = '' must be text that is not empty"),
        ("Absent", "cannot be imported: AttributeError"),
    ],
)
def test_a_target_that_does_not_fit_leaves_no_file(
    own: str, model: DeployedModel, tmp_path: Path, target: str, message: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(ExportError, match=message):
        export_model(model, out / "a.garden", target=f"{own}:{target}")
    assert not out.exists() or not names(out)


def test_a_class_and_an_object_are_taken_too(model: DeployedModel, tmp_path: Path) -> None:
    one = export_model(model, tmp_path / "one.onnx", target=OnnxTarget)
    other = export_model(model, tmp_path / "other.onnx", target=OnnxTarget())
    assert one.path.read_bytes() == other.path.read_bytes()
    with pytest.raises(
        ExportError, match="the export target is a int that does not fit: its attribute 'name'"
    ):
        export_model(model, tmp_path / "third.onnx", target=3)  # type: ignore[arg-type]


def test_the_target_in_the_documentation_works(
    model: DeployedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    source = page.split("## A target of your own")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "documented_targets.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "out" / "garden.onnx.gz"
    exported = export_model(model, path, target="documented_targets:GzippedOnnx", speed=SpeedMeter())
    assert gzip.decompress(path.read_bytes()) == OnnxTarget().lower(model)
    assert exported.card["target"] == "gzipped-onnx"
    assert exported.card["speed"]["speedup"] > 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    experiment = Experiment("digits", model="digits_cnn", budgets=(2.0, 4.0), per_channel=True)
    save_checkpoint(folder, prepare(experiment).start)
    return folder


def test_the_command_takes_a_target_of_ones_own(
    own: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "export",
        "--run",
        str(run),
        "--budget",
        "4",
        "--no-speed",
        "--json",
        "-o",
        str(tmp_path / "out"),
    ]
    assert main([*words, "--format", f"onnx,{own}:Pickled"]) == 0
    cards = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [card["target"] for card in cards] == ["onnx", "pickled"]
    assert cards[0]["accuracy"] == cards[1]["accuracy"]
    assert main([*words, "--format", f"onnx,{own}:Onnx"]) == 2
    assert f"onnx and {own}:Onnx both write .onnx files" in capsys.readouterr().err


# Writing


def test_outputs_without_names_are_numbered(model: DeployedModel, tmp_path: Path) -> None:
    exported = export_model(DeployedModel(model.graph, model.layers, model.side), tmp_path / "a.onnx")
    assert exported.card["class_names"] == [str(label) for label in range(len(CLASSES))]


def test_images_of_another_size_are_refused(model: DeployedModel, tmp_path: Path) -> None:
    tests = LabelledImages(np.zeros((2, 9, 9, 3), np.uint8), np.zeros(2, np.int64), "the garden")
    with pytest.raises(ExportError, match=r"the images of the garden are \(9, 9, 3\), and .* \(8, 8, 3\)"):
        export_model(model, tmp_path / "a.onnx", tests=tests)


def test_a_file_that_is_there_stays_if_the_new_one_fails(
    own: str, model: DeployedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out" / "a.garden"
    export_model(model, path, target=f"{own}:Pickled")
    before = {name: (path.parent / name).read_bytes() for name in names(path.parent)}
    with pytest.raises(ExportError, match="otherwise than the integer reference"):
        export_model(deployed("digits_cnn", (2,)), path, target=f"{own}:Wrong")
    assert {name: (path.parent / name).read_bytes() for name in names(path.parent)} == before

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(exporting, "write_durably", full)
    with pytest.raises(OSError, match="no space left"):
        export_model(deployed("digits_cnn", (2,)), path, target=f"{own}:Pickled")
    assert {name: (path.parent / name).read_bytes() for name in names(path.parent)} == before


def test_verification_can_be_left_out_and_the_card_says_so(
    own: str, model: DeployedModel, tmp_path: Path
) -> None:
    exported = export_model(model, tmp_path / "a.garden", target=f"{own}:Wrong", verify=False)
    assert exported.card["verified_images"] == 0
    assert exported.path.exists()


def test_what_is_no_number_is_no_equal_logit(model: DeployedModel) -> None:
    images = random_images(model.graph, 3)
    logits = model.logits(images)
    require_logits("it", model, images, logits)
    with pytest.raises(ExportError, match="it computes"):
        require_logits("it", model, images, np.where(logits == logits[1], np.float32("nan"), logits))
    with pytest.raises(ExportError, match=r"logits of shape \(2, 7\) for 'digits_cnn', not \(3, 7\)"):
        require_logits("it", model, images, logits[:2])


def test_choosing_a_target_loads_no_runtime() -> None:
    """A board that measures files pays for the runtime of that file alone."""
    heavy = {"torch", "onnx", "onnxruntime", "executorch", "google.protobuf"}
    script = f"import sys, fedmpq.export.targets; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
