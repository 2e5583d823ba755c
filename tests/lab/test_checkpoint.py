"""Checkpoints: all comes back to the bit, a damaged one is told apart, a crash leaves the last good one."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedmpq.lab.checkpoint import FILE_NAME, Checkpoint, CheckpointError, load_checkpoint, save_checkpoint
from fedmpq.lab.experiment import Experiment
from fedmpq.method.archive import Tensors
from fedmpq.method.state import Average, ClientRecord, GlobalModel
from fedmpq.model.graph import INPUT, Flatten, Graph, Input, Linear, Node, Relu
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.quantizers import place_quantizers

Edit = Callable[[dict[str, Any], dict[str, Any]], None]


def make_checkpoint(averaged: bool = False) -> Checkpoint:
    nodes = (
        Node("flat", Flatten(), (INPUT,)),
        Node("a.npy", Linear(12, 7, False), ("flat",)),
        Node("relu", Relu(0.0), ("a.npy",)),
        Node("fc", Linear(7, 3, True), ("relu",)),
    )
    graph = place_quantizers(Graph("small", Input(3, 2, 2, 0.5, 7), nodes, "fc"), 4)
    weights, side = random_state(graph, 0)
    # Values that a way through text would lose.
    weights["fc"][0, :4] = np.array([-0.0, 1e-45, np.finfo(np.float32).max, 1 / 3], np.float32)
    clients = (ClientRecord(0, 2.5, 11), ClientRecord(1, 8.0, 7, (3, 8), (2, 8)))
    average = Average(*random_state(graph, 1)) if averaged else None
    model = GlobalModel(4, weights, side, (3, 6), clients, average)
    experiment = Experiment("digits", budgets=(2.5, 8.0), alpha=math.inf)
    return Checkpoint(experiment, graph, model, ("kätzchen", "hund", ""))


def random_state(graph: Graph, seed: int) -> tuple[Weights, Side]:
    random = np.random.default_rng(seed)
    weights = {
        node.name: random.normal(size=graph.weight_shape(node.name)).astype(np.float32)
        for node in graph.layers
    }
    side = {
        name: np.asarray(random.normal(size=shape), np.float32) for name, shape in graph.side_shapes().items()
    }
    return weights, side


def assert_same(one: Checkpoint, other: Checkpoint) -> None:
    assert one.experiment == other.experiment
    assert one.class_names == other.class_names
    assert one.graph == other.graph
    bare = [replace(each.model, weights={}, side={}, average=None) for each in (one, other)]
    assert bare[0] == bare[1]
    mine, yours = (Tensors.of(each.model).to_arrays() for each in (one, other))
    assert mine.keys() == yours.keys()
    for name, tensor in mine.items():
        assert (tensor.shape, tensor.dtype) == (yours[name].shape, yours[name].dtype)
        assert tensor.tobytes() == yours[name].tobytes()


@pytest.mark.parametrize("averaged", [False, True])
def test_everything_comes_back_to_the_bit(tmp_path: Path, averaged: bool) -> None:
    saved = make_checkpoint(averaged)
    path = save_checkpoint(tmp_path, saved)
    assert path == tmp_path / FILE_NAME
    assert_same(load_checkpoint(tmp_path), saved)
    assert_same(load_checkpoint(path), saved)
    # And once more: what was loaded can be saved.
    save_checkpoint(tmp_path, load_checkpoint(tmp_path))
    assert_same(load_checkpoint(tmp_path), saved)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert (load_checkpoint(path).model.average is not None) == averaged


def test_a_crash_while_writing_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = make_checkpoint()
    save_checkpoint(tmp_path, saved)
    real = np.savez

    def half(file: Any, **arrays: Any) -> None:
        whole = io.BytesIO()
        real(whole, **arrays)
        file.write(whole.getvalue()[:500])
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", half)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, replace(saved, model=replace(saved.model, round=5)))
    monkeypatch.undo()
    assert_same(load_checkpoint(tmp_path), saved)
    save_checkpoint(tmp_path, replace(saved, model=replace(saved.model, round=5)))
    assert load_checkpoint(tmp_path).model.round == 5
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_missing_checkpoint_says_what_to_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / FILE_NAME):
        with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*; name a run's folder"):
            load_checkpoint(path)


def message_for(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def test_other_files_are_no_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    whole = save_checkpoint(tmp_path, make_checkpoint()).read_bytes()
    for content in (b"", b"hello", whole[:1000], whole[:-1], whole[100:], whole[:200] + whole[-200:]):
        path.write_bytes(content)
        message_for(path)
    np.savez(path, weights=np.zeros(3))
    assert "meta" in message_for(path)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save_checkpoint(tmp_path_factory.mktemp("run"), make_checkpoint()).read_bytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_is_found_or_changes_nothing(
    tmp_path: Path, archive: bytes, data: st.DataObject
) -> None:
    bit = data.draw(st.integers(0, 8 * len(archive) - 1))
    damaged = bytearray(archive)
    damaged[bit // 8] ^= 1 << bit % 8
    path = tmp_path / FILE_NAME
    path.write_bytes(damaged)
    try:
        loaded = load_checkpoint(path)
    except CheckpointError:
        return
    assert_same(loaded, make_checkpoint())


def edited(tmp_path: Path, edit: Edit) -> str:
    """The message for a whole archive with other contents."""
    path = save_checkpoint(tmp_path, make_checkpoint(averaged=True))
    with np.load(path) as archive:
        arrays = dict(archive.items())
    meta = json.loads(bytes(arrays.pop("meta")))
    edit(meta, arrays)
    np.savez(path, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
    return message_for(path)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda meta, arrays: meta.update(format=2), "its format is 2, and this version reads format 1"),
        (lambda meta, arrays: meta.pop("format"), "format"),
        (lambda meta, arrays: meta.pop("clients"), "clients"),
        (lambda meta, arrays: meta["clients"].pop(), "clients are not those of its experiment"),
        (lambda meta, arrays: meta["clients"][0].update(mood="good"), "mood"),
        (lambda meta, arrays: meta["experiment"].update(rounds=0), "rounds = 0"),
        (lambda meta, arrays: meta["experiment"].update(colour="red"), "'colour'"),
        (lambda meta, arrays: meta.update(bit_widths=[3]), "1 bit-widths for 2 layers"),
        (lambda meta, arrays: meta["clients"][1].update(returned=[3, 3, 3]), "3 bit-widths for 2 layers"),
        (lambda meta, arrays: arrays.pop("weights/fc"), "weights/fc is missing"),
        (lambda meta, arrays: arrays.update({"side/x": np.zeros(1)}), "side/x is not in the graph"),
        (lambda meta, arrays: arrays.pop("average-weights/fc"), "average-weights/fc is missing"),
        (lambda meta, arrays: arrays.pop("average-side/fc.bias"), "average-side/fc.bias is missing"),
        (
            lambda meta, arrays: arrays.update({"weights/fc": np.zeros((3, 6), np.float32)}),
            r"weights/fc is float32 (3, 6), not float32 (3, 7)",
        ),
        (lambda meta, arrays: arrays.update({"weights/fc": np.zeros((3, 7))}), "weights/fc is float64"),
        (lambda meta, arrays: arrays.update(graph=arrays["graph"][:-3]), "graph"),
    ],
)
def test_contents_that_do_not_fit_together_are_named(tmp_path: Path, edit: Edit, words: str) -> None:
    assert words in edited(tmp_path, edit)


def test_pickles_are_never_run(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, make_checkpoint())
    member = io.BytesIO()
    np.save(member, np.array([Bomb(tmp_path / "ran")], object), allow_pickle=True)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("weights/bomb.npy", member.getvalue())
    message_for(path)
    assert not (tmp_path / "ran").exists()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))
