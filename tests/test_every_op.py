"""Every operation of `ops.RULES` goes all the way, so that a new one cannot be half there.

Each has a small torch network here that uses it. The network is traced, written and read, trained by both
engines, evaluated in integers and floats, given statistics without data and by calibration, and exported to
both formats, which verify themselves against the integer reference to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from fedmpq.exchange.messages import TrainingPlan
from fedmpq.export.exporting import export_model
from fedmpq.model import integer_forward
from fedmpq.model.batch_statistics import quantized_statistics, unquantized_statistics
from fedmpq.model.calibration import measure, statistics_names
from fedmpq.model.deployed import DeployedModel
from fedmpq.model.export_formats import SUFFIXES
from fedmpq.model.float_forward import float_logits
from fedmpq.model.graph import Graph
from fedmpq.model.integer_program import compile_program
from fedmpq.model.module_input import as_taken
from fedmpq.model.module_state import initial_state
from fedmpq.model.native_products import native_products
from fedmpq.model.ops import (
    RULES,
    AdaptiveAvgPool,
    Add,
    AvgPool,
    BatchNorm,
    ChannelShuffle,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    Linear,
    Lookup,
    MaxPool,
    Mul,
    Op,
    Pad,
    Quantize,
    Relu,
    Slice,
    Upsample,
)
from fedmpq.model.quantized import Layers, QuantizedLayer, Side, Weights, dequantize_all
from fedmpq.model.randomness import Draws
from fedmpq.model.trace import trace
from fedmpq.training.engine import Engine, make_engine

CLASSES, CHANNELS, SIZE = 5, 3, 8
SCALE, ZERO_POINT = 1 / 64, 120


class Network(nn.Module):
    """A convolution of 4 channels, `middle` (if `summed`, added to what it reads) and the classes."""

    def __init__(self, features: int, *middle: nn.Module, summed: bool = False) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(CHANNELS, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.middle, self.summed = nn.Sequential(*middle), summed
        self.classes = nn.Linear(features, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stem = self.stem(images)
        middle = self.middle(stem)
        value = functional.relu(middle + stem) if self.summed else middle
        return cast(torch.Tensor, self.classes(value.flatten(1)))


class Gates(nn.Module):
    """Every pixel times a gate between 0 and 1 of its own, and every channel times its mean."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        gated = value * torch.sigmoid(self.gate(value))
        return functional.adaptive_avg_pool2d(value, 1) * gated


class Branches(nn.Module):
    """What it reads as codes with and without a sign, joined, normalized and some channels of it taken."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(4, 3, 1), nn.ReLU())
        self.right = nn.Sequential(nn.Conv2d(4, 5, 3, padding=1), nn.BatchNorm2d(5))
        self.norm = nn.BatchNorm2d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.left(x), x, self.right(x)], dim=1)
        return functional.relu(self.norm(joined))


class Channels(nn.Module):
    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self.channels = slice(start, stop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, self.channels]


PIXELS = SIZE * SIZE
CASES: dict[type[Op], Callable[[], nn.Module]] = {
    Conv2d: lambda: Network(
        6 * 16, nn.Conv2d(4, 6, (3, 2), stride=2, padding=(2, 1), dilation=(2, 2), groups=2), nn.ReLU()
    ),
    Linear: lambda: Network(7, nn.Flatten(), nn.Linear(4 * PIXELS, 7), nn.BatchNorm1d(7), nn.ReLU()),
    BatchNorm: lambda: Network(4 * PIXELS, nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
    Relu: lambda: Network(4 * PIXELS, nn.Conv2d(4, 4, 1), nn.ReLU6()),
    Quantize: lambda: Network(4 * PIXELS, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)),
    Add: lambda: Network(4 * PIXELS, nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), summed=True),
    MaxPool: lambda: Network(4 * 16, nn.MaxPool2d(3, 2, padding=1)),
    AvgPool: lambda: Network(4 * 16, nn.AvgPool2d(2)),
    GlobalAvgPool: lambda: Network(4, nn.AdaptiveAvgPool2d(1)),
    Flatten: lambda: Network(4 * PIXELS),
    Mul: lambda: Network(4 * PIXELS, Gates(4)),
    Lookup: lambda: Network(
        4 * PIXELS, nn.SiLU(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Hardswish(), nn.LeakyReLU(0.1)
    ),
    Concat: lambda: Network(12 * PIXELS, Branches()),
    AdaptiveAvgPool: lambda: Network(4 * 15, nn.AdaptiveAvgPool2d((3, 5))),
    Slice: lambda: Network(2 * PIXELS, Channels(1, 3)),
    ChannelShuffle: lambda: Network(4 * PIXELS, nn.ChannelShuffle(2)),
    Pad: lambda: Network(4 * 9 * 13, nn.ZeroPad2d((2, 3, 0, 1))),
    Upsample: lambda: Network(4 * 6 * PIXELS, nn.Upsample(scale_factor=(2, 3))),
}


class Sequences(nn.Module):
    """One-dimensional layers; windows that reach beyond the end, leave padding out or are uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(CHANNELS, 6, 5, stride=2, padding=2), nn.BatchNorm1d(6), nn.ReLU()
        )
        self.pools = nn.Sequential(
            nn.MaxPool1d(3, 2, ceil_mode=True), nn.AvgPool1d(3, 2, padding=1, count_include_pad=False)
        )
        self.depthwise = nn.Sequential(nn.Conv1d(6, 6, 3, padding="same", groups=6), nn.BatchNorm1d(6))
        self.classes = nn.Linear(24, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pools(self.stem(x))
        joined = torch.cat([pooled, self.depthwise(pooled)], dim=1)
        narrow = functional.adaptive_avg_pool1d(joined, 4)
        return cast(torch.Tensor, self.classes(narrow[:, 3:9].flatten(1)))


class Scores(nn.Module):
    """Without a linear layer at the end, so that the logits are means of codes."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(CHANNELS, 8, 3), nn.ReLU(), nn.BatchNorm2d(8), nn.MaxPool2d(3, 2, 1, ceil_mode=True)
        )
        self.scores = nn.Sequential(
            nn.Conv2d(8, CLASSES, 1), nn.ReLU(), nn.AvgPool2d(3, 3, 1, ceil_mode=True)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.scores(self.features(x)).mean((2, 3), keepdim=True)
        return cast(torch.Tensor, scores.squeeze(-1).squeeze(-1))


VARIANTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sequences": (Sequences, (CHANNELS, 37)),
    "scores": (Scores, (CHANNELS, SIZE, SIZE)),
}


@dataclass(frozen=True)
class Case:
    """A network with random weights, traced and quantized."""

    op: type[Op] | None
    module: nn.Module
    graph: Graph
    weights: Weights
    layers: Layers
    side: Side

    @property
    def deployed(self) -> DeployedModel:
        return DeployedModel(self.graph, self.layers, self.side, tuple("abcde"))


@pytest.fixture(scope="module", params=[*RULES, *VARIANTS], ids=lambda op: getattr(op, "__name__", op))
def case(request: pytest.FixtureRequest) -> Case:
    op: type[Op] | None = None
    if request.param in VARIANTS:
        make, shape = VARIANTS[request.param]
    else:
        op, shape = request.param, (CHANNELS, SIZE, SIZE)
        if request.param not in CASES:
            pytest.fail(f"{request.param.__name__} has no case: add a network that uses it to CASES")
        make = CASES[request.param]
    torch.manual_seed(0)
    module = make()
    image = torch.zeros(1, *shape)
    graph = trace(module, image, name="case", input_scale=SCALE, input_zero_point=ZERO_POINT)
    weights, side = initial_state(module, graph)
    layers = {
        name: QuantizedLayer.from_weights(weight, 4, "least_error", False) for name, weight in weights.items()
    }
    return Case(op, module, graph, weights, layers, side)


def pixels(case: Case, count: int) -> NDArray[np.uint8]:
    channels, height, width = case.graph.input.shape
    return np.random.default_rng(1).integers(0, 256, (count, height, width, channels)).astype(np.uint8)


def test_tracing_finds_it(case: Case) -> None:
    assert any(isinstance(node.op, case.op or Conv2d) for node in case.graph.nodes)


def test_it_crosses_the_wire(case: Case) -> None:
    assert Graph.from_bytes(case.graph.to_bytes()) == case.graph


def test_the_float_forward_is_the_module_itself(case: Case) -> None:
    images = pixels(case, 6)
    real = (torch.from_numpy(images).permute(0, 3, 1, 2).float() - ZERO_POINT) * SCALE
    with torch.no_grad():
        expected = case.module.eval()(as_taken(case.module, real)).numpy()
    found = float_logits(case.graph, case.weights, case.side, images)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_the_integer_forward_has_the_same_bits_by_kernels_and_near_the_float_one(case: Case) -> None:
    images = pixels(case, 64)
    program = compile_program(case.graph, case.layers, case.side)
    logits = integer_forward.logits(program, images)
    native = integer_forward.logits(program, images, products=partial(native_products, threads=2))
    np.testing.assert_array_equal(native, logits)
    real = float_logits(case.graph, dequantize_all(case.layers), case.side, images)
    assert np.corrcoef(logits.reshape(-1), real.reshape(-1))[0, 1] > 0.9


def trained(engine: Engine, case: Case) -> tuple[float, Layers]:
    labels = np.random.default_rng(2).integers(0, CLASSES, 16)
    plan = TrainingPlan(update="carried", learning_rate=0.05, code_learning_rate=0.05)
    engine.load(case.graph, case.layers, case.side, plan, Draws(seed=1, client=2, round=3))
    first = engine.train_epoch([(pixels(case, 16), labels)])
    losses = [engine.train_epoch([(pixels(case, 16), labels)]).loss for _ in range(10)]
    assert losses[-1] < first.loss
    return first.loss, engine.layers()


def test_both_engines_train_it_alike(case: Case) -> None:
    (native, native_layers), (reference, _) = (
        trained(make_engine(name, threads=1), case) for name in ("native", "torch")
    )
    assert native == pytest.approx(reference, rel=1e-3)
    for node in case.graph.layers:
        assert not np.array_equal(native_layers[node.name].codes, case.layers[node.name].codes), node.name


def test_statistics_move_there_and_back(case: Case) -> None:
    quantized = dequantize_all(case.layers)
    moved = quantized_statistics(case.graph, case.weights, quantized, case.side)
    back = unquantized_statistics(case.graph, case.weights, quantized, moved)
    for name, tensor in case.side.items():
        assert np.isfinite(moved[name]).all(), name
        np.testing.assert_allclose(back[name], tensor, rtol=1e-3, atol=1e-4, err_msg=name)


def test_calibration_measures_it(case: Case) -> None:
    measured = measure(case.graph, case.layers, case.side, [pixels(case, 32)])
    assert measured.keys() == set(statistics_names(case.graph))
    for name, tensor in measured.items():
        assert np.isfinite(tensor).all(), name
        assert not np.array_equal(tensor, case.side[name]), name


@pytest.mark.parametrize("target", sorted(SUFFIXES))
def test_it_is_exported_to_the_bit(case: Case, target: str, tmp_path: Path) -> None:
    """A file that is not equal to the integer forward is an error and does not appear."""
    exported = export_model(case.deployed, tmp_path / f"model{SUFFIXES[target]}", target=target)
    assert exported.path.stat().st_size > 0
