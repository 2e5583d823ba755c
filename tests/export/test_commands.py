"""`fedmpq export`, `predict` and `bench`, from a checkpoint to a prediction."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fedmpq.cli.main import main
from fedmpq.cli.predict_command import bar, softmax
from fedmpq.data.data_card import data_facts
from fedmpq.data.sound import log_mel, read_wave
from fedmpq.data.value_range import ValueRange
from fedmpq.export.exporting import export_model
from fedmpq.export.onnx.runtime import OnnxRunner
from fedmpq.lab.checkpoint import FILE_NAME, load_checkpoint, save_checkpoint
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.simulation import prepare
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.module_state import initial_state
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.trace import trace
from tests.data.test_sound import save, tone
from tests.waiting import until

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run before its first round: three clients, two of them alike."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    folder.mkdir()
    experiment = Experiment("digits", model="digits_cnn", budgets=(2.0, 4.0, 4.0), per_channel=True)
    save_checkpoint(folder, prepare(experiment).start)
    return folder


@pytest.fixture(scope="module")
def models(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    assert main(["export", "--run", str(run), "--all", "-o", str(folder), "--no-speed"]) == 0
    return folder


def mistake(capsys: Capture, *words: str) -> str:
    try:
        code = main(words)
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    return err.rstrip()


def test_all_makes_one_file_for_each_distinct_model(models: Path) -> None:
    assert {path.name for path in models.iterdir()} == {
        "client-0.onnx", "client-0.onnx.json", "client-1.onnx", "client-1.onnx.json",
    }  # fmt: skip
    card = json.loads((models / "client-1.onnx.json").read_text(encoding="utf-8"))
    assert (card["run"], card["round"], card["clients"], card["budget"]) == ("small", 0, [1, 2], 4.0)
    assert card["verified_images"] == 16 + 256
    assert 0 <= card["accuracy"] <= 1
    assert card["average_bits"] <= 4


def test_the_table_and_the_json_tell_the_same(run: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["export", "--run", str(run / FILE_NAME), "--client", "0", "-o", str(tmp_path)]
    assert main(words) == 0
    header, row = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["model", "bits"]
    assert row.startswith("client-0.onnx")
    assert row.endswith("272 of 272 images")
    assert main([*words, "--json", "--no-speed"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert f"{facts['file_bytes']:,}" in row
    assert facts["speed"] is None


def test_a_budget_makes_a_model_of_its_own(run: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["export", "--run", str(run), "--budget", "5.5", "-o", str(tmp_path), "--no-speed", "--json"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert Path(facts["path"]).name == "budget-5.5.onnx"
    assert 4.5 < facts["average_bits"] <= 5.5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--client", "9"], "run 'small' has no client 9; it has client-0, client-1, client-2"),
        (["--budget", "9"], "a budget of 9.0 bits per weight is outside 1..8"),
        (["--all", "--format", "tflite"], "no export target is called 'tflite'; take onnx, executorch"),
        (["--all", "--format", "onx"], "no export target is called 'onx' (did you mean 'onnx'?)"),
        (["--all", "--format", ","], "--format ',' names no target; take onnx, executorch"),
        (["--all", "--format", "no.such:Thing"], "'no.such:Thing' cannot be imported: ModuleNotFoundError"),
        (["--all", "--client", "1"], "not allowed with argument"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert message in mistake(capsys, "export", "--run", str(run), "-o", str(tmp_path), *words)


def test_a_simulations_run_needs_nothing_of_the_servers(run: Path, tmp_path: Path) -> None:
    words = ["export", "--run", str(run), "--budget", "4", "-o", str(tmp_path), "--no-speed"]
    script = (
        "import sys\n"
        "for name in ('sqlalchemy', 'alembic', 'fsspec', 'prometheus_client', 'rich', 'grpc'):\n"
        "    sys.modules[name] = None\n"
        f"from fedmpq.cli.main import main; raise SystemExit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_float_run_has_no_integer_model(run: Path, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = load_checkpoint(run)
    experiment = replace(checkpoint.experiment, method="fp32")
    save_checkpoint(tmp_path, replace(checkpoint, experiment=experiment))
    error = mistake(capsys, "export", "--run", str(tmp_path), "--all", "-o", str(tmp_path / "out"))
    assert "trained in full precision and has no integer model" in error


def test_a_checkpoint_of_another_graph_is_refused(run: Path, tmp_path: Path, capsys: Capture) -> None:
    checkpoint = load_checkpoint(run)
    other = prepare(Experiment("digits", model="resnet8", budgets=(2.0, 4.0, 4.0))).start.graph
    save_checkpoint(tmp_path, replace(checkpoint, graph=other))
    error = mistake(capsys, "export", "--run", str(tmp_path), "--all", "-o", str(tmp_path / "out"))
    assert "cannot be used as a checkpoint" in error
    assert not (tmp_path / "out").exists()


# Predicting


def test_predictions_add_up_and_are_sorted(models: Path, tmp_path: Path, capsys: Capture) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "colour.png")
    Image.fromarray(pixels[:8, :8, 0]).save(tmp_path / "grey.png")
    images = [str(tmp_path / "colour.png"), str(tmp_path / "grey.png")]
    assert main(["predict", str(models / "client-0.onnx"), *images, "--top", "10", "--json"]) == 0
    for line, image in zip(capsys.readouterr().out.splitlines(), images, strict=True):
        facts = json.loads(line)
        shares = [each["probability"] for each in facts["classes"]]
        assert facts["image"] == image
        assert sum(shares) == pytest.approx(1, abs=1e-5)
        assert shares == sorted(shares, reverse=True)
        assert {each["class"] for each in facts["classes"]} == set("0123456789")
    assert main(["predict", str(models / "client-0.onnx"), images[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == images[0]
    assert len(lines) == 6
    assert all("%" in line for line in lines[1:])


def test_a_recording_is_heard_as_in_training(models: Path, tmp_path: Path, capsys: Capture) -> None:
    path = save(tmp_path / "tone.wav", tone(880, 0.3))
    assert main(["predict", str(models / "client-0.onnx"), str(path), "--top", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["classes"][0]
    features = log_mel(*read_wave(str(path)), 8, 8)[None, :, :, None]
    shares = softmax(OnnxRunner(models / "client-0.onnx").logits(features)[0])
    assert found["probability"] == pytest.approx(float(shares.max()))


def predicted(capsys: Capture, model: Path, *files: Path) -> list[dict[str, Any]]:
    assert main(["predict", str(model), *map(str, files), "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def executorch_file(run: Path, folder: Path) -> Path:
    words = ["--client", "0", "--format", "executorch", "-o", str(folder), "--no-speed"]
    assert main(["export", "--run", str(run), *words]) == 0
    return folder / "client-0.pte.xz"


def test_arrays_folders_and_both_runtimes_say_the_same(
    run: Path, models: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Pictures in a folder, the same as arrays, and ExecuTorch's file of the same model."""
    pixels = np.random.default_rng(1).integers(0, 256, (3, 8, 8), dtype=np.uint8)
    (tmp_path / "pictures" / "inner").mkdir(parents=True)
    for number, each in enumerate(pixels):
        folder = tmp_path / "pictures" if number < 2 else tmp_path / "pictures" / "inner"
        Image.fromarray(each).save(folder / f"{number}.png")
    (tmp_path / "pictures" / "notes.txt").write_text("no sample", encoding="utf-8")
    np.savez(tmp_path / "arrays.npz", images=pixels, labels=np.zeros(3, np.int64))
    onnx = models / "client-0.onnx"
    pictures = predicted(capsys, onnx, tmp_path / "pictures")
    assert [Path(each["image"]).name for each in pictures] == ["0.png", "1.png", "2.png"]
    arrays = predicted(capsys, onnx, tmp_path / "arrays.npz")
    assert [each["image"].rpartition("[")[2] for each in arrays] == ["0]", "1]", "2]"]
    program = executorch_file(run, tmp_path)
    capsys.readouterr()
    for other in (arrays, predicted(capsys, program, tmp_path / "arrays.npz")):
        assert [each["classes"] for each in other] == [each["classes"] for each in pictures]

    fed = [json.loads(path.with_name(f"{path.name}.json").read_text())["input"] for path in (onnx, program)]
    assert [(each["dtype"], each["stored"]) for each in fed] == [("uint8", "pixel"), ("int8", "pixel - 128")]
    assert [each["layout"][4:12] for each in fed] == ["height, ", "channels"]
    assert all(each["colours"].startswith("grey") and "EXIF" in each["photos"] for each in fed)
    program.with_name("client-0.pte.xz.json").unlink()
    said = mistake(capsys, "predict", str(program), str(tmp_path / "arrays.npz"))
    assert "needs its card beside it, client-0.pte.xz.json" in said


def test_a_folder_without_samples_is_named(models: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "empty").mkdir()
    said = mistake(capsys, "predict", str(models / "client-0.onnx"), str(tmp_path / "empty"))
    assert "holds no image, recording, table or .npz" in said


def test_rows_of_a_table_are_coded_by_the_range_of_the_run(tmp_path: Path, capsys: Capture) -> None:
    """Four measured values each; without a label, and with one."""
    columns = np.random.default_rng(2).normal(size=(3, 4)).round(3)
    model = measured_model(tmp_path)
    lines = ["a,b,c,d", *(",".join(map(str, row)) for row in columns)]
    (tmp_path / "rows.csv").write_text("\n".join(lines), encoding="utf-8")
    labelled = [f"{line},{'label' if number == 0 else 'x'}" for number, line in enumerate(lines)]
    (tmp_path / "labelled.csv").write_text("\n".join(labelled), encoding="utf-8")
    low, high = np.float32(-2), np.float32(2)
    codes = np.clip(np.rint((columns.astype(np.float32) - low) * 255 / (high - low)), 0, 255)
    expected = OnnxRunner(model).logits(codes.astype(np.uint8).reshape(3, 1, 1, 4))
    for name in ("rows.csv", "labelled.csv"):
        found = predicted(capsys, model, tmp_path / name)
        for each, logits in zip(found, expected, strict=True):
            best = each["classes"][0]
            assert best["class"] == str(int(logits.argmax()))
            assert best["probability"] == pytest.approx(float(softmax(logits).max()))


def measured_model(folder: Path) -> Path:
    """A small model of four values that lie in -2..2."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    graph = trace(module, torch.zeros(1, 4, 1, 1), name="m", input_scale=0.01, input_zero_point=127)
    weights, side = initial_state(module, graph)
    codes = {name: QuantizedLayer.from_weights(value, 6, "max", False) for name, value in weights.items()}
    facts = data_facts(None, ValueRange((-2.0,) * 4, (2.0,) * 4))
    model = DeployedModel(graph, codes, side, facts=facts)
    return export_model(model, folder / "measured.onnx").path


def test_predicting_needs_neither_torch_nor_onnx(models: Path, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "black.png")
    script = (
        "import sys; from fedmpq.cli.main import main\n"
        f"code = main(['predict', {str(models / 'client-0.onnx')!r}, {str(tmp_path / 'black.png')!r}])\n"
        "heavy = {'torch', 'onnx', 'executorch', 'google.protobuf', 'sklearn'} & set(sys.modules)\n"
        "raise SystemExit(code or sorted(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_no_image_or_no_model_is_named(models: Path, tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("no image", encoding="utf-8")
    assert "notes.txt is no image" in mistake(capsys, "predict", str(models / "client-0.onnx"), str(text))
    assert "notes.txt cannot be loaded" in mistake(capsys, "predict", str(text), str(text))


def test_bars_and_shares() -> None:
    assert bar(0.0).strip() == ""
    assert bar(1.0) == "█" * 24
    assert {len(bar(share)) for share in np.linspace(0, 1, 50)} == {24}
    np.testing.assert_allclose(softmax(np.array([1000, 1000], np.float32)), [0.5, 0.5])


# Measuring


def test_bench_measures_in_a_process_of_its_own(models: Path, capsys: Capture) -> None:
    words = ["--seconds", "0.05", "--batch", "3", "--json"]
    assert main(["bench", str(models / "client-0.onnx"), *words]) == 0
    facts: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert 0 < facts["p50_milliseconds"] <= facts["p90_milliseconds"] <= facts["p99_milliseconds"]
    assert (facts["batch"], facts["threads"]) == (3, 1)
    assert 20 < facts["peak_megabytes"] < 400


def test_bench_passes_errors_on(tmp_path: Path, capsys: Capture) -> None:
    error = mistake(capsys, "bench", str(tmp_path / "missing.onnx"), "--json")
    assert (
        error
        == f"fedmpq bench: there is no model at {tmp_path / 'missing.onnx'}; name an exported .onnx file"
    )
    for words in (["--batch", "0"], ["--seconds", "nan"], ["--seconds", "inf"]):
        assert "must be above 0 and finite" in mistake(capsys, "bench", "x.onnx", *words)


def test_a_bench_ends_with_the_process_that_asked_for_it(models: Path) -> None:
    words = ["bench", str(models / "client-0.onnx"), "--seconds", "600"]
    parent = subprocess.Popen([sys.executable, "-m", "fedmpq.cli", *words], stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    child = until(lambda: children.read_text(encoding="ascii").split())[0]
    # Not before the child watches its parent, which it does when it has imported everything.
    until(lambda: "onnxruntime" in Path(f"/proc/{child}/maps").read_text(encoding="ascii"))
    parent.kill()
    parent.wait()
    until(lambda: not Path(f"/proc/{child}").exists())
