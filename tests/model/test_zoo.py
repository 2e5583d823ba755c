"""Networks by name, and the user's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.model import zoo
from fedmpq.model.module_state import initial_state
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.model.randomness import Draws
from fedmpq.model.zoo import ModelError
from fedmpq.training.engine import make_engine

torch = pytest.importorskip("torch")


def weights_of(module: torch.nn.Module) -> int:  # type: ignore[name-defined]
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)


def test_names() -> None:
    residual = {"resnet20", "resnet44", "resnet18", "digits_cnn", "resnet8"}
    sensors = {"ds_cnn", "mobilenet_v1_025", "autoencoder", "inertial_cnn"}
    assert set(zoo.names()) == residual | sensors | TORCHVISION.keys()


TORCHVISION = {
    "mobilenet_v2": 2_236_682,
    "mobilenet_v3_small": 1_528_106,
    "shufflenet_v2_x0_5": 352_042,
    "squeezenet1_1": 727_626,
    "efficientnet_b0": 4_020_358,
}
"""Parameters with ten classes of colour images."""


@pytest.mark.parametrize("name", sorted(TORCHVISION))
def test_torchvisions_have_their_parameters(name: str) -> None:
    with torch.device("meta"):
        module = zoo.build(name, classes=10, channels=3)
    assert sum(parameter.numel() for parameter in module.parameters()) == TORCHVISION[name]


# Keras counts BatchNorm's statistics. The reference networks also have a bias before every BatchNorm, and
# their ResNet-8 has no BatchNorm behind its two shortcuts.
@pytest.mark.parametrize(
    ("name", "classes", "channels", "published"),
    [
        ("ds_cnn", 12, 1, 24_908),
        ("mobilenet_v1_025", 2, 3, 221_794),
        ("autoencoder", 640, 1, 269_992),
        ("resnet8", 10, 3, 78_666 + 4 * (32 + 64)),
    ],
)
def test_mlperf_tinys_have_the_published_parameters(
    name: str, classes: int, channels: int, published: int
) -> None:
    module = zoo.build(name, classes=classes, channels=channels)
    counted = sum(tensor.numel() for key, tensor in module.state_dict().items() if "num_batches" not in key)
    norms = torch.nn.BatchNorm1d | torch.nn.BatchNorm2d
    biases = sum(part.num_features for part in module.modules() if isinstance(part, norms))
    assert counted + biases == published


SENSORS = {
    "ds_cnn": (12, (1, 49, 10)),
    "mobilenet_v1_025": (2, (3, 96, 96)),
    "autoencoder": (640, (1, 5, 128)),
    "inertial_cnn": (6, (9, 1, 128)),
}
"""Outputs, and the shape of what they take."""


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SENSORS))
def test_networks_for_sensors_train_alike_on_both_engines(name: str) -> None:
    """The first step's loss, which the reference engine computes in torch, and that all layers learn."""
    outputs, shape = SENSORS[name]
    torch.manual_seed(0)
    module = zoo.build(name, classes=outputs, channels=shape[0])
    graph = zoo.graph_of(name, classes=outputs, input_shape=shape, input_scale=1 / 64, input_zero_point=120)
    weights, side = initial_state(module, graph)
    layers = {key: QuantizedLayer.from_weights(each, 4, "max", False) for key, each in weights.items()}
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (8, *shape[1:], shape[0])).astype(np.uint8)
    batch = images, random.integers(0, outputs, 8)
    plan = TrainingPlan(update="carried", learning_rate=0.01, code_learning_rate=0.05)
    losses = []
    for kind in ("native", "torch"):
        engine = make_engine(kind, 1)
        engine.load(graph, layers, side, plan, Draws(seed=1, client=2, round=3))
        losses.append(engine.train_epoch([batch]).loss)
        fractions, trained = engine.fractions(), engine.layers()
        for node in graph.layers:
            moved = fractions[node.name].any() or (trained[node.name].codes != layers[node.name].codes).any()
            assert moved, node.name
    assert graph.shapes[graph.output] == (outputs,)
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


# He et al. count 0.27 M (ResNet-20) and 0.66 M (ResNet-44) parameters.
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("digits_cnn", 15_000, 30_000),
        ("resnet8", 70_000, 80_000),
        ("resnet20", 265_000, 275_000),
        ("resnet44", 655_000, 665_000),
        ("resnet18", 11_100_000, 11_200_000),
        ("mobilenet_v2", 2_100_000, 2_300_000),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_sizes(name: str, least: int, most: int, channels: int) -> None:
    module = zoo.build(name, classes=10, channels=channels)
    assert least <= weights_of(module) <= most
    with torch.no_grad():
        assert module.eval()(torch.zeros(1, channels, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize("name", ["digits_cnn", "mobilenet_v2"])
def test_a_seed_makes_the_same_weights(name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(next(zoo.build(name, classes=3, channels=1).parameters()))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_convolutions_begin_as_kaiming_says() -> None:
    torch.manual_seed(0)
    module = zoo.build("resnet20", classes=10, channels=3)
    weight = module.get_parameter("layer3.1.conv1.weight")
    assert weight.std().item() == pytest.approx((2 / (64 * 9)) ** 0.5, rel=0.03)


@pytest.mark.slow
def test_graph_has_the_same_id_in_another_process() -> None:
    program = (
        "from fedmpq.model import zoo;"
        "print(zoo.graph_of('digits_cnn', classes=10, input_shape=(1, 8, 8),"
        " input_scale=1/16, input_zero_point=0).id)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    graph = zoo.graph_of(
        "digits_cnn", classes=10, input_shape=(1, 8, 8), input_scale=1 / 16, input_zero_point=0
    )
    assert run.stdout.strip() == graph.id


def test_importing_the_zoo_and_its_graphs_does_not_import_torch() -> None:
    program = (
        "import fedmpq.model.zoo, fedmpq.model.trace, fedmpq.system.torchvision_ops, sys; print(*sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert "numpy" in run.stdout.split()
    assert not {"torch", "torchvision"} & set(run.stdout.split())


USERS = """
import torch

not_callable = 3

def plain():
    return torch.nn.Linear(2, 2)

def sized(classes, *, channels):
    return torch.nn.Linear(channels, classes)

def anything(**sizes):
    return torch.nn.Linear(sizes["channels"], sizes["classes"])

def defaulted(depth=1, classes=9):
    return torch.nn.Linear(depth, classes)

def no_module(classes):
    return classes

def demanding(width):
    return torch.nn.Linear(width, 2)

def failing():
    raise RuntimeError("first line\\nsecond line")
"""


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"users_models_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(USERS)
    monkeypatch.chdir(tmp_path)
    # So that what the zoo adds to the path goes away with the test.
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


@pytest.mark.parametrize(
    ("function", "shape"), [("plain", (2, 2)), ("sized", (7, 5)), ("anything", (7, 5)), ("defaulted", (7, 1))]
)
def test_users_models(users_module: str, function: str, shape: tuple[int, int]) -> None:
    module = zoo.build(f"{users_module}:{function}", classes=7, channels=5)
    assert module.get_parameter("weight").shape == shape


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("not_callable", "is a int, needs a function"),
        ("no_module", "returned a int, needs a torch.nn.Module"),
        ("demanding", "failed with TypeError: .*'width'"),
        ("failing", "failed with RuntimeError: first line"),
        ("missing", "cannot be imported: AttributeError"),
        ("", "names no object; write it as package.module:name"),
    ],
)
def test_users_mistakes(users_module: str, function: str, message: str) -> None:
    spec = f"{users_module}:{function}"
    with pytest.raises(ModelError, match=f"model '{spec}' {message}") as caught:
        zoo.build(spec, classes=7, channels=5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("no.such.package:build", "cannot be imported"),
        (":build", "names no object"),
        ("..:x", "names no object"),
    ],
)
def test_modules_that_cannot_be_imported(spec: str, fault: str) -> None:
    with pytest.raises(ModelError, match=f"model '{spec}' {fault}"):
        zoo.build(spec, classes=7, channels=5)


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(
        ModelError, match=r"no model is called 'resnet21'; take .*resnet20.*package.module:function"
    ):
        zoo.build("resnet21", classes=10, channels=3)
