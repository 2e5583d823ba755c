"""A global model's archive: all comes back to the bit, one model has one hash, what is wrong is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedmpq.method.archive import ArchiveError, Tensors, pack_model, unpack_model
from fedmpq.method.state import Average, ClientRecord, GlobalModel
from tests.server.small_model import GRAPH, first_state

Arrays = dict[str, Any]


def state(averaged: bool) -> Tensors:
    weights, side = first_state(0)
    # Values that a way through text would lose.
    weights["fc"][0, :4] = np.array([-0.0, 1e-45, np.finfo(np.float32).max, 1 / 3], np.float32)
    return Tensors(weights, side, Average(*first_state(1)) if averaged else None)


def same(one: Tensors, other: Tensors) -> bool:
    mine, yours = one.to_arrays(), other.to_arrays()
    return mine.keys() == yours.keys() and all(
        (tensor.dtype, tensor.shape, tensor.tobytes())
        == (yours[name].dtype, yours[name].shape, yours[name].tobytes())
        for name, tensor in mine.items()
    )


@pytest.mark.parametrize("averaged", [False, True])
def test_everything_comes_back_to_the_bit(averaged: bool) -> None:
    original = state(averaged)
    read = unpack_model(GRAPH, pack_model(original))
    assert (read.average is not None) == averaged
    assert same(read, original)
    assert not same(read, state(not averaged))


@pytest.mark.parametrize("averaged", [False, True])
def test_the_same_model_gives_the_same_bytes_and_another_does_not(averaged: bool) -> None:
    data = pack_model(state(averaged))
    assert pack_model(state(averaged)) == data
    assert pack_model(unpack_model(GRAPH, data)) == data
    others = [state(not averaged), state(averaged)]
    others[1].side["bn1.bias"][0] += np.float32(1)
    if averaged:
        others.append(state(averaged))
        assert others[2].average is not None
        others[2].average.weights["fc"][1, 1] += np.float32(1)
    assert len({data, *map(pack_model, others)}) == 1 + len(others)


def test_tensors_are_those_of_a_model_and_make_it_again() -> None:
    clients = (ClientRecord(0, 4.0, 7, (2, 3, 4), (2, 2, 4)), ClientRecord(1, 8.0, 5))
    tensors = state(averaged=True)
    model = tensors.after(6, (3, 4, 5), clients)
    assert isinstance(model, GlobalModel)
    assert (model.round, model.bit_widths, model.clients) == (6, (3, 4, 5), clients)
    assert Tensors.of(model) == tensors
    assert Tensors.of(model).average is model.average


def test_names_of_others_are_left_to_them() -> None:
    arrays = state(averaged=True).to_arrays()
    more = {"graph": np.zeros(3, np.uint8), "meta": np.zeros(2), "picture/one": np.zeros(1)}
    assert same(Tensors.from_arrays(GRAPH, arrays | more), state(averaged=True))


def without(name: str) -> Callable[[Arrays], Arrays]:
    return lambda arrays: {each: array for each, array in arrays.items() if each != name}


def with_array(name: str, array: object) -> Callable[[Arrays], Arrays]:
    return lambda arrays: arrays | {name: array}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("weights/conv2"), "weights/conv2 is missing"),
        (without("side/bn1.bias"), "side/bn1.bias is missing"),
        (without("average-weights/conv2"), "average-weights/conv2 is missing"),
        (without("average-side/bn2.running_var"), "average-side/bn2.running_var is missing"),
        (
            lambda arrays: {n: a for n, a in arrays.items() if not n.startswith("average-weights/")},
            "average-weights/conv1 is missing",
        ),
        (
            lambda arrays: {n: a for n, a in arrays.items() if not n.startswith("average-side/")},
            "average-side/bn1.bias is missing",
        ),
        (
            with_array("average-weights/bn1", np.zeros(1, np.float32)),
            "average-weights/bn1 is not in the graph",
        ),
        (
            with_array("average-weights/fc", np.zeros((5, 35), np.float32)),
            "average-weights/fc is float32 (5, 35), not float32 (5, 36)",
        ),
        (with_array("average-side/fc.bias", np.zeros(5)), "average-side/fc.bias is float64 (5,)"),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[Arrays], Arrays], message: str) -> None:
    arrays = change(state(averaged=True).to_arrays())
    with pytest.raises(ArchiveError) as caught:
        Tensors.from_arrays(GRAPH, arrays)
    assert str(caught.value).startswith(message)
