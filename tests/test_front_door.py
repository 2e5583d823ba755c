"""`import fedmpq`: what it gives, what it costs, and that each thing works as its page says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedmpq
from fedmpq.data.dataset import DataError
from fedmpq.data.in_memory import InMemory, from_pairs
from fedmpq.lab.experiment import ExperimentError
from fedmpq.lab.run import RunError
from fedmpq.method.post_training import QuantizeError

HEAVY = {"torch", "torchvision", "onnx", "onnxruntime", "executorch", "pandas", "grpc", "sqlalchemy", "numpy"}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        logits: torch.Tensor = self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))
        return logits


class Pairs:
    """As a torch data set without transforms."""

    classes = ("dark", "grey", "light")

    def __init__(self, count: int = 60) -> None:
        random = np.random.default_rng(2)
        self.labels = np.arange(count) % 3
        self.images = (random.integers(0, 60, (count, 6, 5)) + 80 * self.labels[:, None, None]).astype(
            np.uint8
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        return self.images[index], int(self.labels[index])


QUICK: dict[str, Any] = {
    "rounds": 2,
    "epochs": 1,
    "batch_size": 8,
    "participation": 1.0,
    "alpha": float("inf"),
    "progress": False,
}


def program(code: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_it_loads_nothing(tmp_path: Path) -> None:
    code = f"import sys, fedmpq; print(sorted({HEAVY!r} & set(sys.modules)), fedmpq.__version__)"
    assert program(code, tmp_path).startswith("[] ")


def test_every_name_is_there_and_listed() -> None:
    assert set(fedmpq.__all__) <= set(dir(fedmpq))
    for name in fedmpq.__all__:
        assert getattr(fedmpq, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'simulat'"):
        fedmpq.simulat  # noqa: B018


def test_export_is_called_before_and_after_the_room_is_loaded(tmp_path: Path) -> None:
    ask = "print(callable(fedmpq.export))"
    code = f"import fedmpq; {ask}; import fedmpq.export.exporting; {ask}"
    assert program(code, tmp_path).split() == ["True", "True"]


def test_a_network_and_data_without_names_are_trained_read_and_exported(tmp_path: Path) -> None:
    run = fedmpq.simulate(Network(), Pairs(), budgets=[2, 8], folder=tmp_path / "run", workers=1, **QUICK)
    assert len(run.history) == 2
    assert run.budgets == (2.0, 8.0)
    assert run.class_names == Pairs.classes
    assert run.history[-1]["mean_deployed"] == run.history["mean_deployed"][-1]
    model = run.deployed(budget=4)
    assert 1 <= model.bits_per_weight <= 4
    images = Pairs().images[..., None]
    labels = model.predict(images)
    assert labels.shape == (60,)
    assert model.accuracy(images, Pairs().labels) == np.mean(labels == Pairs().labels)
    again = fedmpq.load_run(tmp_path / "run")
    assert again.deployed(client="client-0").logits(images).tobytes() == (
        run.deployed(client=0).logits(images).tobytes()
    )
    exported = fedmpq.export(model, tmp_path / "model.onnx")
    assert exported.path == tmp_path / "model.onnx"
    with pytest.raises(RunError, match="no client 7; it has client-0, client-1"):
        run.deployed(client=7)
    with pytest.raises(RunError, match=r"outside 1\.\.8"):
        run.deployed(budget=9)


def test_a_data_source_trains_as_the_same_data_does() -> None:
    settings = {**QUICK, "workers": 1, "budgets": [2, 8], "rounds": 1}
    torch.manual_seed(0)
    network = Network()
    data = from_pairs(Pairs()).coded()
    of_source = fedmpq.simulate(network, InMemory(data), **settings)
    assert of_source.history["loss"] == fedmpq.simulate(network, data, **settings).history["loss"]


def test_a_folder_is_not_replaced_unasked_and_a_run_goes_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**QUICK, "workers": 1, "budgets": [2, 8], "folder": tmp_path / "run"}
    torch.manual_seed(0)
    network = Network()
    fedmpq.simulate(network, Pairs(), **settings)
    with pytest.raises(ExperimentError, match="already holds a run; pass resume=True"):
        fedmpq.simulate(network, Pairs(), **settings)
    longer = fedmpq.simulate(network, Pairs(), **{**settings, "rounds": 3, "resume": True})
    assert len(longer.history) == 3
    with pytest.raises(ExperimentError, match="other settings; only rounds may change"):
        fedmpq.simulate(network, Pairs(), **{**settings, "resume": True, "seed": 5})


class KeepsOnlyTheRich(fedmpq.QuantizedMethod):
    """Merges the updates of 8-bit clients alone."""

    def merge(self, model: fedmpq.GlobalModel, updates: Iterable[fedmpq.Update]) -> fedmpq.GlobalModel:
        rich = {client.client for client in model.clients if client.budget == 8}
        return super().merge(model, [update for update in updates if update.client in rich])


def test_a_method_of_ones_own_merges(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**QUICK, "rounds": 1, "workers": 1, "budgets": [2, 8]}
    torch.manual_seed(0)
    network = Network()
    own = fedmpq.simulate(network, Pairs(), method=KeepsOnlyTheRich, **settings)
    plain = fedmpq.simulate(network, Pairs(), **settings)
    assert own.model.clients[0].dealt is None
    assert own.model.clients[1].dealt is not None
    assert any(
        tensor.tobytes() != plain.model.weights[name].tobytes() for name, tensor in own.model.weights.items()
    )


def test_floats_have_no_integer_model(tmp_path: Path) -> None:
    run = fedmpq.simulate(Network(), Pairs(), method="fp32", budgets=[2, 8], workers=1, **QUICK)
    assert len(run.history) == 2
    with pytest.raises(RunError, match="trained in full precision"):
        run.deployed(budget=4)


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Spawned workers must not run the script again."""
    (tmp_path / "script.py").write_text(
        "import fedmpq\n"
        "print('once')\n"
        "run = fedmpq.simulate('digits_cnn', 'digits', budgets=[2, 8], rounds=1, epochs=1, train_limit=60,\n"
        "                      test_limit=20, participation=1.0, progress=False, workers=1)\n"
        "print(len(run.history))\n"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path, timeout=300
    )
    assert done.stdout.split() == ["once", "1"], done.stderr


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((np.full((4, 6, 5), 7.0, np.float32), [0, 1, 2, 0]), "8-bit codes need a range"),
        ((np.zeros((4, 6, 5), np.uint8), [0, 1]), "one whole number for each of the 4 samples"),
        ((np.zeros((4, 6, 5), np.uint8), [0, 1, -1, 0]), "label -1 is negative"),
    ],
)
def test_data_that_does_not_fit_is_refused(data: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        fedmpq.simulate(Network(), data, budgets=[2, 8], **QUICK)  # type: ignore[arg-type]
    with pytest.raises(ExperimentError, match="data is a int; give a path"):
        fedmpq.simulate(Network(), 3, budgets=[2, 8], **QUICK)  # type: ignore[arg-type]


# Quantizing what was trained elsewhere


def trained() -> Network:
    torch.manual_seed(1)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    pairs = Pairs(120)
    images = torch.from_numpy(pairs.images.astype(np.float32) / 255)[:, None]
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), torch.from_numpy(pairs.labels)).backward()
        optimizer.step()
    return network.eval()


def test_a_trained_network_keeps_its_accuracy_at_four_bits() -> None:
    network, pairs = trained(), Pairs()
    with torch.no_grad():
        logits = network(torch.from_numpy(pairs.images.astype(np.float32) / 255)[:, None])
    exact = float((logits.argmax(1).numpy() == pairs.labels).mean())
    assert exact > 0.9
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    images = pairs.images[..., None]
    for budget in (8, 4):
        quantized = fedmpq.quantize(network, budget, images)
        assert quantized.bits_per_weight <= budget
        assert quantized.accuracy(images, pairs.labels) >= exact - 0.05
    assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())


def test_calibration_images_must_be_the_networks() -> None:
    with pytest.raises(QuantizeError, match="give \\(N, H, W, C\\)"):
        fedmpq.quantize(Network(), 4, np.zeros((8, 6, 5), np.uint8))
    with pytest.raises(QuantizeError, match="1 calibration images are too few"):
        fedmpq.quantize(Network(), 4, np.zeros((1, 6, 5, 1), np.uint8))
