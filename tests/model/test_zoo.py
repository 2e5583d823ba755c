"""Networks by name, and the user's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedmpq.model import zoo
from fedmpq.model.zoo import ModelError

torch = pytest.importorskip("torch")


def weights_of(module: torch.nn.Module) -> int:  # type: ignore[name-defined]
    return sum(parameter.numel() for parameter in module.parameters() if parameter.ndim > 1)


def test_names() -> None:
    expected = {"resnet20", "resnet44", "mobilenet_v2", "resnet18", "digits_cnn", "resnet8"}
    assert set(zoo.names()) == expected


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
