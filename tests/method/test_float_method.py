"""The full-precision methods: FedAvg against a plain loop, the codecs, and that nothing is carried over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedmpq.data.dataset import Dataset
from fedmpq.exchange import fedpaq, uveqfed
from fedmpq.exchange.compression import UpdateError
from fedmpq.exchange.float_messages import ExactChanges, FedPAQChanges, FloatUpdate, UVeQFedChanges
from fedmpq.lab.experiment import Experiment, make_experiment
from fedmpq.lab.first_model import make_graph, seeded_module
from fedmpq.method.float_method import FloatMethod
from fedmpq.method.recipe import FLOAT_METHODS
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.model import zoo
from fedmpq.model.calibration import calibration_batches
from fedmpq.model.graph import Graph
from fedmpq.model.module_state import initial_state
from fedmpq.model.quantized import Side, Weights
from fedmpq.model.randomness import Draws, Purpose
from fedmpq.training.engine import TrainingError
from fedmpq.training.float_trainer import FloatTrainer
from fedmpq.training.local_round import batches

CLASSES = ("a", "b", "c")
CLIENTS = [ClientRecord(0, 2.0, 20), ClientRecord(1, 4.0, 12), ClientRecord(2, 8.0, 8)]


class Network(nn.Module):
    """Small, with what a graph does not hold: dropout, and a counter that training reads."""

    gain = 1.0

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(4 * 25, classes)
        self.register_buffer("calls", torch.zeros(()))
        self.calls: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            x = x + 0.1 * self.calls
        x = torch.relu(self.bn(self.conv(x)))
        logits: torch.Tensor = self.fc(self.drop(torch.flatten(x, 1)))
        return logits * self.gain if self.training else logits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo._ZOO, "network", lambda classes, channels: Network(classes, channels))


@pytest.fixture(scope="module")
def data() -> Dataset:
    random = np.random.default_rng(3)
    labels = random.integers(0, 3, 40)
    images = random.integers(0, 150, (40, 5, 5, 1)) + 50 * labels[:, None, None, None]
    return Dataset(images.astype(np.uint8), labels.astype(np.int64), CLASSES)


PARTS = {0: np.arange(20), 1: np.arange(20, 32), 2: np.arange(32, 40)}


def experiment(method: str = "fp32", **changes: object) -> Experiment:
    settings = {"model": "network", "epochs": 2, "batch_size": 7, "budgets": [2, 4, 8]}
    return make_experiment({"data": "digits", "method": method, **settings, **changes})


class Simulated(FloatMethod, FloatTrainer):
    """Server and clients in one."""

    def __init__(self, made: Experiment, graph: Graph) -> None:
        FloatMethod.__init__(self, graph, made.float_recipe(), made.seed)
        self.network = seeded_module(made, len(CLASSES), graph.input.channels)
        FloatTrainer.__init__(self, graph, self.network)

    def first(self) -> GlobalModel:
        return self.start(*initial_state(self.network, self.graph), CLIENTS)


def simulation(data: Dataset, method: str = "fp32", **changes: object) -> tuple[Simulated, GlobalModel]:
    simulated = Simulated(experiment(method, **changes), graph_of(data))
    return simulated, simulated.first()


_graphs: dict[str, Graph] = {}


def graph_of(data: Dataset) -> Graph:
    """Traced once: it is the same for all float methods."""
    if "network" not in _graphs:
        _graphs["network"] = make_graph(experiment(), data)
    return _graphs["network"]


def updates_of(simulated: Simulated, model: GlobalModel, data: Dataset) -> list[FloatUpdate]:
    return [simulated.train(simulated.assign(model, c), data.subset(PARTS[c.client])) for c in model.clients]


def decoded(update: FloatUpdate, seed: int = 0) -> Weights:
    return update.changes.decoded(Draws(seed, update.client, update.round))


def assert_same(one: Weights | Side, other: Weights | Side) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.tobytes() == other[name].tobytes(), name


# FedAvg


def plain_sgd(model: GlobalModel, data: Dataset, client: int) -> tuple[Weights, Side, float]:
    """The same local training in the plainest way, from a module of its own."""
    made, graph = experiment(), graph_of(data)
    module = seeded_module(made, len(CLASSES), 1)
    tensors = {f"{name}.weight": torch.from_numpy(w.copy()) for name, w in model.weights.items()}
    tensors |= {name: torch.from_numpy(t.copy()) for name, t in model.side.items()}
    module.load_state_dict(tensors, strict=False)
    draws = Draws(made.seed, client, model.round + 1)
    losses: list[tuple[float, int]] = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    with torch.random.fork_rng():
        torch.manual_seed(
            int(np.random.SeedSequence((made.seed, client, model.round + 1)).generate_state(1)[0])
        )
        module.train()
        for epoch in range(2):
            losses = []
            for images, labels in batches(data.subset(PARTS[client]), made.plan(), draws, epoch, 0):
                real = (images.astype(np.float32) - graph.input.zero_point) * np.float32(graph.input.scale)
                optimizer.zero_grad()
                loss = functional.cross_entropy(
                    module(torch.from_numpy(real).permute(0, 3, 1, 2)), torch.from_numpy(labels)
                )
                loss.backward()
                optimizer.step()
                losses.append((loss.item(), len(labels)))
    weights, side = initial_state(module, graph)
    return weights, side, sum(loss * n for loss, n in losses) / sum(n for _, n in losses)


def test_fp32_is_fedavg(data: Dataset) -> None:
    simulated, model = simulation(data)
    updates = updates_of(simulated, model, data)
    expected = [plain_sgd(model, data, client) for client in range(3)]
    for update, (weights, side, loss) in zip(updates, expected, strict=True):
        assert_same(decoded(update), {name: weights[name] - model.weights[name] for name in weights})
        assert_same(update.side, side)
        assert update.loss == pytest.approx(loss)
    merged = simulated.merge(model, updates)
    assert merged.round == 1
    for name, tensor in merged.weights.items():
        mean = sum(
            len(PARTS[n]) * weights[name].astype(np.float64) for n, (weights, _, _) in enumerate(expected)
        )
        assert tensor == pytest.approx(mean / 40, abs=1e-6)
    for name, tensor in merged.side.items():
        mean = sum(len(PARTS[n]) * side[name].astype(np.float64) for n, (_, side, _) in enumerate(expected))
        assert tensor == pytest.approx(mean / 40, abs=1e-6)


def test_the_budget_has_no_say_in_fp32(data: Dataset) -> None:
    simulated, model = simulation(data)
    rich = replace(model, clients=tuple(replace(c, budget=8.0) for c in model.clients))
    one = simulated.merge(model, updates_of(simulated, model, data))
    other = simulated.merge(rich, updates_of(simulated, rich, data))
    assert_same(one.weights, other.weights)


@pytest.mark.parametrize("method", ["fp32", "fedpaq", "uveqfed"])
def test_the_order_of_the_updates_does_not_matter(data: Dataset, method: str) -> None:
    simulated, model = simulation(data, method)
    updates = updates_of(simulated, model, data)
    one, other = simulated.merge(model, updates), simulated.merge(model, reversed(updates))
    assert_same(one.weights, other.weights)
    assert_same(one.side, other.side)
    assert one.clients == model.clients


@pytest.mark.parametrize("method", ["fp32", "fedpaq", "uveqfed"])
def test_a_task_depends_on_nothing_but_itself(data: Dataset, method: str) -> None:
    """Not on the clients trained before it in the same process, nor on torch's generator."""
    simulated, model = simulation(data, method)
    first = updates_of(simulated, model, data)[2]
    torch.manual_seed(1)
    alone, _ = simulation(data, method)
    again = alone.train(alone.assign(model, model.clients[2]), data.subset(PARTS[2]))
    assert_same(decoded(first), decoded(again))
    assert_same(first.side, again.side)
    assert (first.loss, first.nbytes) == (again.loss, again.nbytes)


def test_training_leaves_torchs_generator_as_it_was(data: Dataset) -> None:
    simulated, model = simulation(data)
    torch.manual_seed(5)
    before = torch.rand(3)
    torch.manual_seed(5)
    simulated.train(simulated.assign(model, CLIENTS[0]), data.subset(PARTS[0]))
    assert torch.equal(torch.rand(3), before)


def test_rounds_seeds_and_clients_draw_their_own(data: Dataset) -> None:
    simulated, model = simulation(data)
    base = simulated.train(simulated.assign(model, CLIENTS[0]), data.subset(PARTS[0]))
    later = simulated.train(simulated.assign(replace(model, round=1), CLIENTS[0]), data.subset(PARTS[0]))
    other = simulated.train(simulated.assign(model, CLIENTS[1]), data.subset(PARTS[0]))
    seeded, _ = simulation(data, seed=9)
    sown = seeded.train(seeded.assign(model, CLIENTS[0]), data.subset(PARTS[0]))
    found = [decoded(base), decoded(later), decoded(other), decoded(sown, seed=9)]
    assert len({change["fc"].tobytes() for change in found}) == 4


def test_the_model_on_the_devices_is_w(data: Dataset) -> None:
    simulated, model = simulation(data)
    assert simulated.deployments(model, CLIENTS) == []
    logits = simulated.logits(model.weights, model.side, data.images)
    assert logits.shape == (40, 3)
    module = seeded_module(experiment(), 3, 1).eval()
    image = graph_of(data).input
    real = (data.images.astype(np.float32) - image.zero_point) * np.float32(image.scale)
    with torch.no_grad():
        expected = module(torch.from_numpy(real).permute(0, 3, 1, 2)).numpy()
    assert logits == pytest.approx(expected, abs=1e-5)
    # Evaluating between two trainings changes neither.
    update = simulated.train(simulated.assign(model, CLIENTS[0]), data.subset(PARTS[0]))
    assert_same(update.side, updates_of(simulated, model, data)[0].side)
    again = simulated.logits(model.weights, model.side, data.images)
    assert again.tobytes() == logits.tobytes()


@pytest.mark.parametrize("method", ["fp32", "fedpaq", "uveqfed"])
def test_devices_run_the_moving_average_where_one_is_asked_for(data: Dataset, method: str) -> None:
    """`(W_2 + d W_1) / (1 + d)` after two rounds, while training goes on from `W_2`."""
    simulated, start = simulation(data, method, averaging=0.25)
    plain, _ = simulation(data, method)
    first = simulated.merge(start, updates_of(simulated, start, data))
    second = simulated.merge(first, updates_of(simulated, first, data))
    without = plain.merge(replace(first, average=None), updates_of(plain, first, data))
    assert_same(second.weights, without.weights)
    assert_same(second.side, without.side)
    final, last = second.final, without.final
    for mean, newer, older in (
        (final.weights, second.weights, first.weights),
        (final.side, second.side, first.side),
    ):
        assert mean.keys() == newer.keys()
        for name, tensor in mean.items():
            assert tensor == pytest.approx((newer[name] + 0.25 * older[name]) / 1.25, rel=1e-5, abs=1e-6)
    assert_same(last.weights, second.weights)
    averaged = simulated.logits(final.weights, final.side, data.images)
    assert averaged.tobytes() != plain.logits(last.weights, last.side, data.images).tobytes()


# Codecs


def change(seed: int = 0, shape: tuple[int, ...] = (8, 25)) -> np.ndarray:
    return np.random.default_rng(seed).laplace(0, 0.01, shape).astype(np.float32)


def changes(*shapes: tuple[int, ...]) -> Weights:
    return {f"layer{index}": change(index, shape) for index, shape in enumerate(shapes)}


def test_fp32_sends_the_change_itself() -> None:
    sent = changes((8, 25), (3, 7))
    made = ExactChanges(sent)
    assert_same(made.decoded(Draws(0, 1, 1)), sent)
    assert made.nbytes == 4 * (8 * 25 + 3 * 7)


def test_fedpaq_sends_whole_bits_drawn_by_layer() -> None:
    sent, draws = changes((8, 25), (4, 10)), Draws(0, 1, 1)
    made = FedPAQChanges.of(sent, 4.0, draws)
    found = made.decoded(draws)
    for layer, (name, delta) in enumerate(sent.items()):
        uniforms = draws.uniform(delta.size, Purpose.UPLOAD, layer=layer)
        assert found[name].tobytes() == fedpaq.decode(fedpaq.encode(delta, 4, uniforms)).tobytes()
    assert made.nbytes == 4 + 8 * 25 * 4 // 8 + 4 + 4 * 10 * 4 // 8
    assert_same(FedPAQChanges.of(sent, 4.9, draws).decoded(draws), found)


def test_uveqfed_uses_a_fractional_budget_in_full() -> None:
    sent, draws = changes((40, 101)), Draws(0, 1, 1)
    made = [UVeQFedChanges.of(sent, budget, draws) for budget in (2.0, 2.5, 3.0)]
    sizes = [each.nbytes for each in made]
    assert sizes[0] < sizes[1] < sizes[2]
    errors = [np.square(each.decoded(draws)["layer0"] - sent["layer0"]).sum() for each in made]
    assert errors[0] > errors[1] > errors[2]
    # Tables and padding aside, the bits are what the budget says.
    assert sizes[1] * 8 / (40 * 101) == pytest.approx(2.5, abs=0.35)


def test_uveqfed_takes_all_layers_as_one_vector() -> None:
    sent, draws = changes((5, 7), (40, 101), (3,)), Draws(0, 1, 1)
    made = UVeQFedChanges.of(sent, 4.0, draws)
    found = made.decoded(draws)
    flat = np.concatenate([delta.ravel() for delta in sent.values()])
    dither = draws.uniform(uveqfed.uniforms_needed(flat.size), Purpose.UPLOAD)
    payload = uveqfed.encode(flat, 4.0, dither)
    assert made.nbytes == payload.nbytes
    assert {name: delta.shape for name, delta in found.items()} == {n: d.shape for n, d in sent.items()}
    joined = np.concatenate([delta.ravel() for delta in found.values()])
    assert joined.tobytes() == uveqfed.decode(payload, dither).tobytes()


@pytest.mark.parametrize("method", ["fedpaq", "uveqfed"])
def test_a_poor_client_uploads_less_and_side_tensors_whole(data: Dataset, method: str) -> None:
    simulated, model = simulation(data, method)
    updates = updates_of(simulated, model, data)
    sizes = [update.nbytes for update in updates]
    assert sizes[0] < sizes[1] < sizes[2]
    exact, _ = simulation(data, "fp32")
    for update, full in zip(updates, updates_of(exact, model, data), strict=True):
        assert_same(update.side, full.side)
        assert update.nbytes < full.nbytes
    sent = simulated.assign(model, CLIENTS[0])
    assert sent.nbytes == 4 * sum(t.size for t in (*model.weights.values(), *model.side.values()))


def test_eight_bits_come_near_the_exact_change(data: Dataset) -> None:
    exact = updates_of(*simulation(data, "fp32"), data)[2]
    greatest = max(float(np.abs(delta).max()) for delta in decoded(exact).values())
    for method in ("fedpaq", "uveqfed"):
        coarse = updates_of(*simulation(data, method), data)[2]
        for name, delta in decoded(exact).items():
            # UVeQFed's step is that of the whole model.
            scale = np.abs(delta).max() if method == "fedpaq" else greatest
            assert np.abs(decoded(coarse)[name] - delta).max() <= scale / 40


# Failures


@pytest.mark.parametrize("method", FLOAT_METHODS)
def test_a_loss_that_is_no_number_names_the_learning_rate(data: Dataset, method: str) -> None:
    simulated, model = simulation(data, method, learning_rate=1e30)
    with pytest.raises(TrainingError, match=r"lower the learning rate \(now 1e\+30\)"):
        updates_of(simulated, model, data)


@pytest.mark.parametrize("method", FLOAT_METHODS)
def test_so_does_a_last_step_that_diverges(
    data: Dataset, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch: the loss is still a number, and what it leads to is not."""
    monkeypatch.setattr(Network, "gain", 1e6)
    simulated, model = simulation(data, method, learning_rate=3e38, epochs=1, batch_size=64)
    with pytest.raises(
        TrainingError, match=r"not finite after training; lower the learning rate \(now 3e\+38\)"
    ):
        updates_of(simulated, model, data)


def test_codecs_refuse_what_is_not_finite() -> None:
    sent = changes((8, 25), (2, 3))
    sent["layer1"][0, 0] = np.inf
    for kind in (FedPAQChanges, UVeQFedChanges):
        with pytest.raises(UpdateError, match="NaN or an infinity"):
            kind.of(sent, 4.0, Draws(0, 1, 1))


# Calibration


def test_calibrated_statistics_are_those_of_the_batches(data: Dataset) -> None:
    """Against the convolution's own outputs; the module adds a tenth for every batch it has seen."""
    simulated, model = simulation(data, statistics="calibrated", batch_size=6)
    assert simulated.calibrates
    own = data.subset(PARTS[0])
    found = simulated.measure(simulated.calibration(model, CLIENTS[0]), own)
    assert (found.round, found.client, found.samples) == (0, 0, 20)
    weight = torch.from_numpy(model.weights["conv"])
    sums, squares, graph = torch.zeros(4), torch.zeros(4), graph_of(data)
    order = list(calibration_batches(Draws(0, 0, 0), 6, own.images))
    assert [len(images) for images in order] == [6, 6, 6, 2]
    for number, images in enumerate(order, start=1):
        real = (torch.from_numpy(images.astype(np.float32)) - graph.input.zero_point) * graph.input.scale
        out = functional.conv2d(real.permute(0, 3, 1, 2) + 0.1 * number, weight, padding=1)
        flat = out.permute(1, 0, 2, 3).reshape(4, -1)
        sums += len(images) * flat.mean(dim=1)
        squares += len(images) * (flat.var(dim=1) + flat.mean(dim=1) ** 2)
    mean = sums / 20
    np.testing.assert_allclose(found.statistics["bn.running_mean"], mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.statistics["bn.running_var"], squares / 20 - mean**2, rtol=1e-3)


def test_a_calibration_depends_on_its_task_alone(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the process did before: dropout before a BatchNorm draws anew, and counters start again."""

    class Dropping(Network):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(functional.dropout(x, 0.5, self.training))

    graph = graph_of(data)
    monkeypatch.setitem(zoo._ZOO, "network", lambda classes, channels: Dropping(classes, channels))
    simulated = Simulated(experiment(statistics="calibrated"), graph)
    model = simulated.first()
    own, other = data.subset(PARTS[0]), data.subset(PARTS[1])
    first = simulated.measure(simulated.calibration(model, CLIENTS[0]), own)
    simulated.train(simulated.assign(model, CLIENTS[1]), other)
    torch.rand(3)
    again = simulated.measure(simulated.calibration(model, CLIENTS[0]), own)
    assert_same(first.statistics, again.statistics)
    before = torch.random.get_rng_state()
    simulated.measure(simulated.calibration(model, CLIENTS[0]), own)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_clients_count_by_their_data_and_training_goes_on_from_where_it_was(data: Dataset) -> None:
    simulated, model = simulation(data, statistics="calibrated", averaging=0.5)
    model = simulated.merge(model, updates_of(simulated, model, data))
    found = [
        simulated.measure(simulated.calibration(model, c), data.subset(PARTS[c.client])) for c in CLIENTS
    ]
    calibrated = simulated.calibrated(model, found)
    means = np.stack([one.statistics["bn.running_mean"] for one in found]).astype(np.float64)
    squares = np.stack([one.statistics["bn.running_var"] for one in found]) + means**2
    mean = np.average(means, axis=0, weights=[20, 12, 8])
    variance = np.average(squares, axis=0, weights=[20, 12, 8]) - mean**2
    np.testing.assert_allclose(calibrated.final.side["bn.running_mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(calibrated.final.side["bn.running_var"], variance, rtol=1e-5)
    assert_same(calibrated.final.weights, model.final.weights)
    assert calibrated.weights is model.weights
    assert calibrated.side is model.side
