"""A client's round: batches, pruning, changes, the update it gives, and data it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.change import Fractions, change_of
from fedmpq.exchange.messages import Assignment, TrainingPlan, Update, bit_widths, pack_layers, unpack_layers
from fedmpq.model.graph import Graph
from fedmpq.model.pruning import prune_msb
from fedmpq.model.quantized import Layers, QuantizedLayer, Side
from fedmpq.model.randomness import Draws, Purpose
from fedmpq.training.augment import pad_crop_flip
from fedmpq.training.engine import Batch, EpochResult, Shift, TrainingError, make_engine
from fedmpq.training.local_round import batches, run_local_round

pytestmark = pytest.mark.usefixtures("one_thread")

Made = Callable[..., Any]
PLAN = TrainingPlan(epochs=2, batch_size=4, update="carried", code_learning_rate=0.02)
PAPER = replace(PLAN, update="paper")


def assigned(model: Any, plan: TrainingPlan, seed: int = 0, client: int = 3, number: int = 1) -> Assignment:
    return Assignment(seed, number, client, pack_layers(model.layers), model.side, plan)


def indexed(count: int) -> Dataset:
    """Images that say which sample they are, for `make_model`."""
    images = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 6, 5, 3))
    return Dataset(images.copy(), np.arange(count) % 3, ("a", "b", "c"))


class Recorder:
    """An engine that trains nothing, keeps the batches it gets, and gives back what it is told to."""

    def __init__(
        self, trained: Layers | None = None, fractions: Mapping[str, Fractions] | None = None
    ) -> None:
        self.epochs: list[list[Batch]] = []
        self._trained = trained
        self._fractions = fractions

    def load(
        self,
        graph: Graph,
        layers: Layers,
        side: Side,
        plan: TrainingPlan,
        draws: Draws,
        shift: Shift | None = None,
    ) -> None:
        self.loaded = layers
        self.shift = shift
        self.draws = draws
        self._side = side

    def train_epoch(self, given: Iterable[Batch]) -> EpochResult:
        self.epochs.append(list(given))
        return EpochResult(sum(len(labels) for _, labels in self.epochs[-1]), 1.0 / len(self.epochs), 0.5)

    def layers(self) -> Layers:
        return self._trained or self.loaded

    def rest(self) -> None:
        """There is nothing to give back."""

    def fractions(self) -> Mapping[str, Fractions]:
        still = {name: np.zeros(layer.codes.size, np.int8) for name, layer in self.loaded.items()}
        return self._fractions or still

    def side(self) -> Side:
        return self._side


def first_pixels(epoch: list[Batch]) -> list[int]:
    return [int(image[0, 0, 0]) for images, _ in epoch for image in images]


def test_the_engine_gets_the_model_and_the_draws_of_the_assignment(make_model: Made) -> None:
    model, engine = make_model(), Recorder()
    run_local_round(engine, model.graph, assigned(model, PLAN, seed=5, client=6, number=7), indexed(10))
    assert engine.draws == Draws(seed=5, client=6, round=7)
    for name, layer in model.layers.items():
        assert np.array_equal(engine.loaded[name].codes, layer.codes)
        assert engine.loaded[name].bits == layer.bits
        assert np.array_equal(engine.loaded[name].step, layer.step)


def test_every_epoch_has_every_sample_in_an_order_of_its_own(make_model: Made) -> None:
    model, engine = make_model(), Recorder()
    run_local_round(engine, model.graph, assigned(model, replace(PLAN, epochs=3)), indexed(10))
    orders = [first_pixels(epoch) for epoch in engine.epochs]
    assert [[len(labels) for _, labels in epoch] for epoch in engine.epochs] == [[4, 4, 2]] * 3
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]
    for images, labels in engine.epochs[0]:
        assert images.dtype == np.uint8
        assert images.flags.c_contiguous
        assert labels.tolist() == (images[:, 0, 0, 0] % 3).tolist()


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_a_last_batch_of_one_sample_is_left_out(make_model: Made, count: int) -> None:
    model, engine = make_model(), Recorder()
    update = run_local_round(engine, model.graph, assigned(model, PLAN), indexed(count))
    for epoch in engine.epochs:
        assert min(len(labels) for _, labels in epoch) >= 2
        assert len(first_pixels(epoch)) == count - (count % 4 == 1)
    assert update.samples == count


@pytest.mark.parametrize(("pad", "flip"), [(2, True), (2, False), (0, True)])
def test_augmentation_shifts_each_sample_by_its_own_draws(make_data: Made, pad: int, flip: bool) -> None:
    data, draws, fill = make_data(11), Draws(1, 2, 3), 77
    plan = replace(PLAN, pad=pad, flip=flip)
    plain = list(batches(data, PLAN, draws, epoch=4, fill=fill))
    augmented = list(batches(data, plan, draws, epoch=4, fill=fill))
    shifts = draws.uniform(33, Purpose.AUGMENT, step=4).reshape(11, 3)
    order = np.argsort(draws.uniform(11, Purpose.ORDER, step=4), kind="stable")
    start, changed = 0, 0
    for (before, labels), (after, same_labels) in zip(plain, augmented, strict=True):
        chosen = order[start : start + len(labels)]
        start += len(labels)
        assert np.array_equal(before, data.images[chosen])
        assert np.array_equal(labels, data.labels[chosen])
        assert np.array_equal(labels, same_labels)
        assert np.array_equal(after, pad_crop_flip(before, shifts[chosen], pad, fill, flip))
        assert after.flags.c_contiguous
        changed += int((before != after).any(axis=(1, 2, 3)).sum())
    assert changed > 0


def test_the_border_of_an_augmented_image_is_the_zero_point(make_model: Made) -> None:
    """Real 0, not black: the graph's zero point."""
    model, engine = make_model(), Recorder()
    data = Dataset(np.full((20, 6, 5, 3), 255, np.uint8), np.zeros(20, np.int64), ("a",))
    run_local_round(engine, model.graph, assigned(model, replace(PLAN, pad=2)), data)
    values = {int(v) for epoch in engine.epochs for images, _ in epoch for v in np.unique(images)}
    assert values == {255, model.graph.input.zero_point}


def few_large(bits: int, size: int, large: int) -> NDArray[np.uint8]:
    """Codes of magnitude 0 but for the `large` first ones, which are the greatest."""
    codes = np.full(size, 2 ** (bits - 1), np.uint8)
    codes[:large] = 2**bits - 1
    return codes


def pruned_update(model: Any, density: float | None) -> Update:
    """A round whose training leaves layers of 108, 36, 144 and 27 weights with few large ones."""
    large = {"stem": 3, "depthwise": 36, "wide": 0, "classes": 0}
    trained = {
        name: QuantizedLayer(
            few_large(layer.bits, layer.codes.size, large[name]).reshape(layer.codes.shape),
            layer.bits,
            layer.step,
        )
        for name, layer in model.layers.items()
    }
    plan = replace(PAPER, prune_density=density)
    return run_local_round(Recorder(trained), model.graph, assigned(model, plan), indexed(4))


def test_pruning_follows_training_and_the_update_says_how_many_bits_are_left(make_model: Made) -> None:
    """3 of 108 is under 0.03, 36 of 36 is not; an empty plane goes until two bits are left."""
    model = make_model(bits=6)
    update = pruned_update(model, 0.03)
    assert bit_widths(model.graph, update.layers) == (2, 6, 2, 2)
    stem = unpack_layers(model.graph, update.layers)["stem"]
    assert np.array_equal(stem.codes.reshape(-1), few_large(2, 108, 3))
    for name, layer in update.layers.items():
        assert np.array_equal(layer.step, model.layers[name].step)


def test_pruning_can_be_switched_off(make_model: Made) -> None:
    model = make_model(bits=6)
    assert bit_widths(model.graph, pruned_update(model, None).layers) == (6, 6, 6, 6)
    assert bit_widths(model.graph, pruned_update(model, 0.0).layers) == (6, 6, 2, 2)


def test_pruning_happens_once_after_the_last_epoch(make_model: Made, make_data: Made) -> None:
    """The update holds what pruning makes of the engine's codes, which are themselves unpruned."""
    model, engine = make_model(bits=8), make_engine("torch")
    plan = replace(PAPER, prune_density=0.6)
    update = run_local_round(engine, model.graph, assigned(model, plan), make_data(12))
    trained = engine.layers()
    assert {layer.bits for layer in trained.values()} == {8}
    for name, layer in unpack_layers(model.graph, update.layers).items():
        codes, bits = prune_msb(trained[name].codes, 8, 0.6)
        assert layer.bits == bits
        assert np.array_equal(layer.codes, codes)
    assert min(bit_widths(model.graph, update.layers)) < 8


# Changes


@pytest.mark.parametrize("per_channel", [False, True])
def test_under_the_carried_rule_the_update_is_the_change_and_never_pruned(
    make_model: Made, per_channel: bool
) -> None:
    model, random = make_model(bits=5, per_channel=per_channel), np.random.default_rng(0)
    trained = {
        name: replace(layer, codes=np.minimum(layer.codes + random.integers(0, 2, layer.codes.shape), 31))
        for name, layer in model.layers.items()
    }
    trained = {name: replace(layer, codes=layer.codes.astype(np.uint8)) for name, layer in trained.items()}
    fractions = {
        name: random.integers(-128, 128, layer.codes.size, dtype=np.int8) for name, layer in trained.items()
    }
    engine = Recorder(trained, fractions)
    plan = replace(PLAN, prune_density=1.0)
    update = run_local_round(engine, model.graph, assigned(model, plan), indexed(4))
    for name, found in unpack_layers(model.graph, update.layers).items():
        sent = model.layers[name]
        expected = change_of(sent, trained[name], fractions[name])
        assert (found.bits, found.step.shape) == (5, sent.step.shape)
        assert np.array_equal(found.codes, expected.codes)
        assert np.array_equal(found.step, expected.step)
        # It is that of the trained weights, to the step of its grid.
        moved = trained[name].codes.astype(int) * 256 + fractions[name].reshape(sent.codes.shape)
        moved -= sent.codes.astype(int) * 256
        step = found.step.reshape(-1, *(1,) * (moved.ndim - 1)) if per_channel else found.step
        assert np.abs(moved - step * (found.codes - 15.5)).mean() <= step.max() / 2


def test_a_model_that_nothing_has_moved_is_no_change(make_model: Made) -> None:
    """Below 8 bits no code is zero: the nearest are half of the least step either side."""
    for bits, codes in ((4, {7, 8}), (8, {128})):
        model = make_model(bits=bits)
        update = run_local_round(Recorder(), model.graph, assigned(model, PLAN), indexed(4))
        for layer in unpack_layers(model.graph, update.layers).values():
            assert layer.step == 1
            assert set(layer.codes.reshape(-1).tolist()) == codes


@pytest.mark.parametrize("name", ["torch", "native"])
def test_the_change_is_the_engines_own(make_model: Made, make_data: Made, name: str) -> None:
    """Lasso and pruning are the paper's: under the carried rule they change nothing."""
    model, engine = make_model(bits=3), make_engine(name, 1)
    plan = replace(PLAN, code_learning_rate=0.3)
    update = run_local_round(engine, model.graph, assigned(model, plan), make_data(12))
    fractions, trained = engine.fractions(), engine.layers()
    assert any((trained[layer].codes != model.layers[layer].codes).any() for layer in trained)
    for layer, found in unpack_layers(model.graph, update.layers).items():
        expected = change_of(model.layers[layer], trained[layer], fractions[layer])
        assert np.array_equal(found.codes, expected.codes)
        assert np.array_equal(found.step, expected.step)
    plain = replace(plan, lasso=0.0, prune_density=None)
    strong = replace(plan, lasso=50.0, prune_density=1.0)
    one, other = (
        run_local_round(make_engine(name, 1), model.graph, assigned(model, each), make_data(12))
        for each in (plain, strong)
    )
    assert equal(one, other)


def test_progress_hears_of_every_epoch_and_the_update_has_the_last_one(make_model: Made) -> None:
    model, heard = make_model(), []
    update = run_local_round(
        Recorder(),
        model.graph,
        assigned(model, replace(PLAN, epochs=3), client=8, number=9),
        indexed(9),
        lambda epoch, result: heard.append((epoch, result)),
    )
    assert heard == [(epoch, EpochResult(8, 1.0 / (epoch + 1), 0.5)) for epoch in range(3)]
    assert (update.round, update.client, update.samples) == (9, 8, 9)
    assert (update.loss, update.accuracy) == (1.0 / 3, 0.5)


def equal(left: Update, right: Update) -> bool:
    return all(
        np.array_equal(left.layers[name].planes, right.layers[name].planes)
        and np.array_equal(left.layers[name].step, right.layers[name].step)
        for name in left.layers
    ) and all(np.array_equal(left.side[name], right.side[name]) for name in left.side)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["paper", "carried"])
@pytest.mark.parametrize("pad", [0, 1])
def test_a_round_repeats_to_the_bit_and_its_key_matters(
    make_model: Made, make_data: Made, update: Any, pad: int
) -> None:
    model, data = make_model(), make_data(21)
    plan = replace(PLAN, update=update, pad=pad, flip=bool(pad), momentum_bits=8)

    def run(**key: int) -> Update:
        return run_local_round(make_engine("torch"), model.graph, assigned(model, plan, **key), data)

    first = run()
    assert equal(first, run())
    assert (first.loss, first.accuracy) == (run().loss, run().accuracy)
    for other in ({"seed": 1}, {"client": 1}, {"number": 2}):
        assert not equal(first, run(**other))


def test_a_round_learns(make_model: Made, make_data: Made) -> None:
    model, losses = make_model(bits=8), []
    plan = replace(PLAN, epochs=6, batch_size=8)
    run_local_round(
        make_engine("torch"),
        model.graph,
        assigned(model, plan),
        make_data(96),
        lambda _, result: losses.append(result.loss),
    )
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_samples_are_an_error_that_names_the_client(make_model: Made, count: int) -> None:
    model = make_model()
    with pytest.raises(TrainingError, match=f"client 3 has {count} samples?; .* at least 2"):
        run_local_round(Recorder(), model.graph, assigned(model, PLAN), indexed(count))


def test_images_of_another_shape_are_an_error_that_names_both(make_model: Made) -> None:
    model = make_model()
    data = Dataset(np.zeros((4, 6, 5, 1), np.uint8), np.zeros(4, np.int64), ("a",))
    with pytest.raises(TrainingError, match=r"client 3 has images of \(6, 5, 1\) .* takes \(6, 5, 3\)"):
        run_local_round(Recorder(), model.graph, assigned(model, PLAN), data)


def test_labels_beyond_the_models_classes_are_an_error(make_model: Made) -> None:
    model = make_model()
    data = Dataset(np.zeros((4, 6, 5, 3), np.uint8), np.array([0, 1, 3, 2]), ("a", "b", "c", "d"))
    with pytest.raises(TrainingError, match="client 3 has label 3, the model's 3 classes end at 2"):
        run_local_round(Recorder(), model.graph, assigned(model, PLAN), data)
