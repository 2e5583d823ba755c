"""Photos straight from phones: trained on boards, evaluated on the server, predicted, with no size given
anywhere but in the run's description of its model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedmpq.cli.main import main
from fedmpq.data.photo import read_photo
from fedmpq.export.onnx.runtime import OnnxRunner
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.stored_run import read_history, read_stored_run
from tests.data.phone_photos import CLASSES, phone_folder
from tools.programs import FEDMPQ, PATIENCE, Program, free_port, wait_for_port

SETTINGS = {
    "model": "digits_cnn",
    "image": [8, 8, 3],
    "class_names": CLASSES,
    "test_data": "test",
    "clients_per_round": 2,
    "rounds": 2,
    "epochs": 3,
    "batch_size": 8,
}


def test_photos_from_phones_train_evaluate_and_predict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, folder in enumerate(("test", "board-0", "board-1")):
        phone_folder(tmp_path / folder, 8, number)
    phone_folder(tmp_path / "other", 2, 9)
    (tmp_path / "other" / "day").rename(tmp_path / "board-1" / "birthday")
    state = tmp_path / "state"
    assert main(["server", "init", "--host", "localhost", "--state", str(state)]) == 0
    assert main(["server", "bundle", "board-0", "board-1", "board-2", "--state", str(state)]) == 0
    config = tmp_path / "phones.toml"
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in SETTINGS.items()))
    port = free_port()
    words = ["server", str(config), "--state", str(state), "--listen", f"127.0.0.1:{port}"]
    with Program([*FEDMPQ, *words, "--exit-when-done"], tmp_path / "server.log") as server:
        wait_for_port(port, server)
        # One board has a class that the model lacks and says so; it is not chosen, and nobody waits for it.
        with (
            board(tmp_path, 2, port, tmp_path / "board-1") as unfit,
            board(tmp_path, 0, port, tmp_path / "board-0") as one,
            board(tmp_path, 1, port, tmp_path / "board-1", "--skip-class", "birthday") as other,
        ):
            assert server.wait(PATIENCE) == 0, server.last_words()
            assert all(each.wait(20) == 0 for each in (one, other))
    assert "class 'birthday' is none of the model's 2 classes (day, night)" in unfit.log.read_text()
    assert "round 1" not in unfit.log.read_text()
    assert "1 files are left out, such as" in one.log.read_text()
    assert "files are left out of the test data" in server.log.read_text()
    stored = read_stored_run(StateFolder(state))
    _, history = read_history(StateFolder(state))
    assert history[-1]["mean_deployed"] >= 0.9
    assert {client.samples for client in stored.model.clients} == {16}
    predict(tmp_path, state, capsys)


def board(folder: Path, number: int, port: int, data: Path, *more: str) -> Program:
    name = f"board-{number}"
    words = ["client", "--server", f"localhost:{port}", "--budget", "4", "--data", str(data), *more]
    words += ["--bundle", str(folder / "state" / "bundles" / name), "--state", str(folder / f"state-{name}")]
    words += ["--threads", "1", "--exit-when-done", "--retry-least", "0.1", "--retry-most", "0.5"]
    return Program([*FEDMPQ, *words], folder / f"{name}.log")


def predict(folder: Path, state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exported file sees what the server saw, and a damaged photo is named and left out."""
    models, photos = folder / "models", sorted((folder / "test").rglob("IMG*"))
    assert main(["export", "--run", str(state), "--budget", "4", "--no-speed", "-o", str(models)]) == 0
    capsys.readouterr()
    file = models / "budget-4.onnx"
    assert main(["predict", str(file), *map(str, photos), "--top", "1", "--json"]) == 2
    printed = capsys.readouterr()
    assert f"1 of {len(photos)} files left out: {folder / 'test' / 'night' / 'IMG_9999.jpg'}" in printed.err
    found = [json.loads(line) for line in printed.out.splitlines()]
    right = np.mean([each["classes"][0]["class"] == Path(each["image"]).parent.name for each in found])
    assert right >= 0.9
    runner = OnnxRunner(file)
    for each in found:
        logits = runner.logits(read_photo(each["image"], (8, 8), 3)[None])[0]
        assert each["classes"][0]["class"] == CLASSES[int(logits.argmax())]
