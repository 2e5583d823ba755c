"""`fedmpq quantize`, as a person runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedmpq.cli.main import main
from fedmpq.data.named import load_named
from fedmpq.model import zoo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that was trained on digits in full precision, elsewhere."""
    train, _ = load_named("digits")
    torch.manual_seed(0)
    module = zoo.build("digits_cnn", classes=10, channels=1)
    optimizer = torch.optim.Adam(module.parameters(), 0.01)
    images = torch.from_numpy(train.images).permute(0, 3, 1, 2).float() / 255
    labels = torch.from_numpy(train.labels)
    for start in list(range(0, 1400, 100)) * 3:
        optimizer.zero_grad()
        part = slice(start, start + 100)
        torch.nn.functional.cross_entropy(module((images[part] - 0.3) / 0.35), labels[part]).backward()
        optimizer.step()
    path = tmp_path_factory.mktemp("weights") / "w.pt"
    torch.save(module.state_dict(), path)
    return path


def command(weights: Path, out: Path, *more: str) -> list[str]:
    words = ["quantize", "digits_cnn", "--weights", str(weights), "--calibration", "digits"]
    return [*words, "--mean", "0.3", "--std", "0.35", "-o", str(out), *more]


@pytest.mark.parametrize("budget", ["4", "3"])
def test_a_file_appears_with_its_card(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], budget: str
) -> None:
    out = tmp_path / "digits.onnx"
    assert main(command(weights, out, "--budget", budget, "--json")) == 0
    card = json.loads(capsys.readouterr().out)
    assert Path(card["path"]) == out
    assert out.stat().st_size == card["file_bytes"]
    assert card["average_bits"] <= float(budget)
    assert card["accuracy"] > 0.9
    assert card["verified_images"] > 0


def test_a_person_is_told_bits_bytes_and_accuracy(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(weights, tmp_path / "d.pte.xz", "--budget", "4")) == 0
    out = capsys.readouterr().out
    assert "per weight: conv1" in out
    assert "equal to the bit" in out
    assert "labelled images of digits" in out


def test_of_another_task_its_metric_is_told(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten questions instead of one: the same outputs, each a yes where it is above 0."""
    assert main(command(weights, tmp_path / "d.onnx", "--budget", "4", "--task", "multi_label")) == 0
    card = json.loads((tmp_path / "d.onnx.json").read_text(encoding="utf-8"))
    assert (card["task"], card["metric"]) == ("multi_label", "f1")
    assert card["auroc"] > 0.9
    assert f"macro F1 {card['f1']:.1%} on 359 of digits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "9"], "--budget 9 is outside 1..8"),
        (["--budget", "4", "--mean", "0.1,0.2"], "mean has shape (2,); the network takes 1 channels"),
        (["--budget", "4", "--std", "x"], "'x' is not a number or a list"),
    ],
)
def test_what_cannot_be_is_one_line(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    try:
        code: object = main(command(weights, tmp_path / "d.onnx", *words))
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "d.onnx").exists()


def test_weights_of_another_network_and_an_unknown_ending_are_refused(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = command(weights, tmp_path / "d.onnx", "--budget", "4")
    other[1] = "resnet8"
    assert main(other) == 2
    assert "it is of another network" in capsys.readouterr().err
    assert main(command(weights, tmp_path / "d.tflite", "--budget", "4")) == 2
    assert "ends like the files of no export target" in capsys.readouterr().err


def test_random_weights_are_worse_than_trained_ones(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So the weights were read at all."""
    torch.manual_seed(3)
    torch.save(zoo.build("digits_cnn", classes=10, channels=1).state_dict(), tmp_path / "random.pt")
    assert main(command(tmp_path / "random.pt", tmp_path / "r.onnx", "--budget", "8", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] < 0.5
