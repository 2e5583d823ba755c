"""Weights to start from: state dicts, earlier runs, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedmpq.method.warm_start import WarmStartError, load_into, read_weights
from fedmpq.model import zoo
from fedmpq.model.graph import Graph
from fedmpq.model.module_state import initial_state
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.trace import trace


def network(seed: int, classes: int = 4) -> torch.nn.Module:
    torch.manual_seed(seed)
    return zoo.build("digits_cnn", classes=classes, channels=1)


def traced(module: torch.nn.Module) -> tuple[Graph, Weights, Side]:
    graph = trace(module, torch.zeros(1, 1, 8, 8), name="n", input_scale=1 / 64, input_zero_point=100)
    return graph, *initial_state(module, graph)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_state_dict_takes_the_place_of_the_first_weights(tmp_path: Path, wrapped: bool) -> None:
    other = network(1)
    state = other.state_dict()
    torch.save({"state_dict": state, "epoch": 3} if wrapped else state, tmp_path / "w.pt")
    graph, weights, side = traced(network(0))
    found, found_side = read_weights(tmp_path / "w.pt").start(graph, weights, side)
    for name, tensor in found.items():
        assert np.array_equal(tensor, state[f"{name}.weight"].numpy())
        assert not np.array_equal(tensor, weights[name])
    assert np.array_equal(found_side["fc.bias"], state["fc.bias"].numpy())
    clips = [name for name in side if name.endswith(".clip")]
    assert clips
    assert all(found_side[name] == side[name] for name in clips)


def test_a_module_takes_them_too(tmp_path: Path) -> None:
    torch.save(network(1).state_dict(), tmp_path / "w.pt")
    module = network(0)
    load_into(module, read_weights(tmp_path / "w.pt"))
    for name, tensor in network(1).state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(module.state_dict()[name], tensor), name


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    graph, weights, side = traced(network(0))
    torch.save(network(1, classes=7).state_dict(), tmp_path / "seven.pt")
    with pytest.raises(WarmStartError, match=r"fc\.weight has shape \(7, 32\).*and \(4, 32\) in the network"):
        read_weights(tmp_path / "seven.pt").start(graph, weights, side)
    torch.save({"conv.weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(WarmStartError, match=r"has no .*and \d+ more: it is of another network"):
        read_weights(tmp_path / "other.pt").start(graph, weights, side)
    broken = network(1).state_dict()
    broken["fc.bias"][0] = float("nan")
    torch.save(broken, tmp_path / "nan.pt")
    with pytest.raises(WarmStartError, match=r"fc\.bias in .* holds a NaN"):
        read_weights(tmp_path / "nan.pt").start(graph, weights, side)


def test_files_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WarmStartError, match="there are no weights at"):
        read_weights(tmp_path / "gone.pt")
    with pytest.raises(WarmStartError, match=r"there are no weights at .*checkpoint\.npz"):
        read_weights(tmp_path)
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(WarmStartError, match="cannot be read as a state dict"):
        read_weights(tmp_path / "text.pt")
    (tmp_path / "x.bin2").write_text("hello")
    with pytest.raises(WarmStartError, match="neither a state dict"):
        read_weights(tmp_path / "x.bin2")
    np.savez(tmp_path / "a.npz", x=np.zeros(3))
    with pytest.raises(WarmStartError, match="holds no graph"):
        read_weights(tmp_path / "a.npz")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(WarmStartError, match=r"holds a list; save module\.state_dict"):
        read_weights(tmp_path / "list.pt")
