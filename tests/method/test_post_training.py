"""Quantizing a trained network: clips against a search by brute force, normalisations, budgets, exports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedmpq.method import post_training
from fedmpq.method.post_training import QuantizeError, fitted_clips, quantize_model
from fedmpq.method.quantize import quantize
from fedmpq.method.trained_network import Normalisation, read_network
from fedmpq.model.float_forward import float_logits, float_values
from fedmpq.model.graph import Quantize

Numbers = float | tuple[float, ...]


class Network(nn.Module):
    def __init__(self, channels: int = 3, bias: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 3, padding=1, bias=bias)
        self.bn = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.second = nn.Conv2d(8, 8, 3, bias=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv(x)))
        x = torch.relu(self.second(x))
        logits: torch.Tensor = self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))
        return logits


def made(**options: bool) -> Network:
    torch.manual_seed(0)
    return Network(**options).eval()


def images(count: int = 40) -> np.ndarray:
    """Bright and dark ones, red and blue ones."""
    random = np.random.default_rng(1)
    colour = random.integers(0, 180, (count, 1, 1, 3))
    return (colour + random.integers(0, 76, (count, 7, 6, 3))).astype(np.uint8)


def module_logits(module: nn.Module, pixels: np.ndarray, mean: Numbers, std: Numbers) -> np.ndarray:
    real = (pixels / 255 - np.array(mean)) / np.array(std)
    with torch.no_grad():
        found: torch.Tensor = module(torch.from_numpy(real.astype(np.float32)).permute(0, 3, 1, 2))
    return found.numpy()


def test_a_clip_is_the_best_of_a_fine_search() -> None:
    model = read_network(made(), (7, 6, 3), Normalisation(0.5, 0.25), activation_bits=4)
    clips = fitted_clips(model.graph, model.weights, model.side, images())
    for node, value in float_values(model.graph, model.weights, model.side, images()):
        if not isinstance(node.op, Quantize):
            continue
        high = 2 ** (node.op.bits - node.op.signed) - 1

        def error(clip: float, value: np.ndarray = value, high: int = high) -> float:
            step = clip / high
            rounded = np.clip(np.rint(value / step), -high if value.min() < 0 else 0, high) * step
            return float(np.square(rounded - value).sum())

        greatest = float(np.abs(value).max())
        best = min(error(clip) for clip in np.linspace(0.05, 1.0, 400) * greatest)
        assert error(float(clips[f"{node.name}.clip"])) <= 1.05 * best


@pytest.mark.parametrize(
    ("mean", "std"), [(0.0, 1.0), (0.5, 0.25), ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))]
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_normalisation_goes_into_the_first_layer(mean: Numbers, std: Numbers, bias: bool) -> None:
    """Exactly but at the border, where padding stands for a pixel that is not quite the mean."""
    module = made(bias=bias)
    pixels = images()
    model = read_network(module, (7, 6, 3), Normalisation(mean, std))
    expected = module_logits(module, pixels, mean, std)
    found = float_logits(model.graph, model.weights, model.side, pixels)
    np.testing.assert_allclose(found, expected, atol=0.02 * float(np.abs(expected).max()))
    wrong = float_logits(model.graph, model.weights, model.side, 255 - pixels)
    assert np.abs(wrong - expected).max() > 0.05 * np.abs(expected).max()


def test_bits_stay_within_the_budget_and_more_are_no_worse() -> None:
    module, pixels = made(), images(200)
    with torch.no_grad():
        # As after training: BatchNorm holds the statistics of its images.
        module.bn.momentum = 1.0
        module.train()
        module_logits(module, pixels, 0.5, 0.25)
        module.eval()
    expected = module_logits(module, pixels, 0.5, 0.25)
    errors = []
    for budget in (2, 3.5, 8):
        model = quantize(module, budget, pixels, mean=0.5, std=0.25)
        assert model.bits_per_weight <= budget
        errors.append(1 - float(np.corrcoef(model.logits(pixels).ravel(), expected.ravel())[0, 1]))
    assert errors[2] < 0.02
    assert errors[0] >= errors[1] >= errors[2]


def test_a_network_without_batch_norm_is_quantized_too() -> None:
    module, pixels = made(norm=False, bias=True), images()
    model = quantize(module, 8, pixels, mean=0.5, std=0.25)
    expected = module_logits(module, pixels, 0.5, 0.25)
    assert np.corrcoef(model.logits(pixels).ravel(), expected.ravel())[0, 1] > 0.99


def test_activations_that_never_move_have_a_clip() -> None:
    module = made()
    with torch.no_grad():
        module.second.weight.zero_()
        nn.init.constant_(module.second.bias, -1.0)  # type: ignore[arg-type]
    model = quantize(module, 4, images(), mean=0.5, std=0.25)
    assert np.isfinite(model.logits(images())).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5, 0.5)}, "mean has shape (2,); the network takes 3 channels"),
        ({"std": 0.0}, "std = 0.0; it must be finite, and above 0"),
        ({"mean": float("nan")}, "mean = nan; it must be finite"),
    ],
)
def test_a_normalisation_that_cannot_be_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(QuantizeError) as caught:
        quantize(made(), 4, images(), **options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_a_first_layer_that_cannot_take_a_mean_is_named() -> None:
    with pytest.raises(QuantizeError, match="'conv' has neither a bias nor a BatchNorm"):
        quantize(made(norm=False), 4, images(), mean=(0.4, 0.5, 0.6), std=0.25)


def test_images_of_another_kind_are_refused() -> None:
    model = read_network(made(), (7, 6, 3), Normalisation())
    with pytest.raises(QuantizeError, match=r"float32 of shape .*takes uint8 of shape \(N, 7, 6, 3\)"):
        quantize_model(model, 4, images().astype(np.float32))
    with pytest.raises(QuantizeError, match="1 calibration images are too few"):
        quantize_model(model, 4, images(1))


def test_a_last_batch_of_one_image_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post_training, "CALIBRATION_BATCH", 13)
    model = read_network(made(), (7, 6, 3), Normalisation())
    one, other = (quantize_model(model, 4, images(40)[:count]) for count in (39, 40))
    assert np.array_equal(one.logits(images()), other.logits(images()))
    assert replace(one, facts={}).bit_widths == other.bit_widths
