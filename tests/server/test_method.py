"""The server's side of a round: what is dealt, what is sent, and what comes of the updates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpq.model.exchange import Assignment, TrainingPlan, Update, bit_widths, pack_layers, unpack_layers
from fedmpq.model.graph import (
    INPUT,
    BatchNorm,
    Conv2d,
    Flatten,
    Graph,
    Input,
    Linear,
    Node,
    Relu,
)
from fedmpq.model.grid import GridError
from fedmpq.model.pruning import prune_msb
from fedmpq.model.quantized import Layers, QuantizedLayer, Side, Weights, average_bits
from fedmpq.model.quantizers import place_quantizers
from fedmpq.server.aggregate import MergeError
from fedmpq.server.method import QuantizedMethod, RoundQuantizer, select_clients
from fedmpq.server.recipe import Profile, Recipe, ablated, aqfl, fedmpq, fpq8
from fedmpq.server.state import ClientRecord, GlobalModel

PLAN = TrainingPlan()
PAPER, BEST = fedmpq("paper", PLAN), fedmpq("best", PLAN)
DELTAS = replace(PAPER, merge="deltas", plan=replace(PAPER.plan, prune_density=None))
Train = Callable[[Layers], Layers]


def make_graph() -> Graph:
    nodes = (
        Node("conv1", Conv2d(1, 6, (3, 3), (1, 1), (1, 1), (1, 1), 1, False), (INPUT,)),
        Node("bn1", BatchNorm(6, 1e-5, 0.125), ("conv1",)),
        Node("relu", Relu(0.0), ("bn1",)),
        Node("conv2", Conv2d(6, 4, (3, 3), (2, 2), (0, 0), (1, 1), 1, False), ("relu",)),
        Node("bn2", BatchNorm(4, 1e-5, 0.125), ("conv2",)),
        Node("relu2", Relu(0.0), ("bn2",)),
        Node("flat", Flatten(), ("relu2",)),
        Node("fc", Linear(36, 5, True), ("flat",)),
    )
    return place_quantizers(Graph("small", Input(1, 8, 8, 0.015625, 128), nodes, "fc"), 4)


GRAPH = make_graph()
SIZES = GRAPH.layer_sizes


def state(seed: int) -> tuple[Weights, Side]:
    random = np.random.default_rng(seed)
    weights = {
        node.name: random.normal(0, 0.3, GRAPH.weight_shape(node.name)).astype(np.float32)
        for node in GRAPH.layers
    }
    side = {
        name: np.asarray(random.uniform(0.5, 1.5, shape), np.float32)
        for name, shape in GRAPH.side_shapes().items()
    }
    return weights, side


def records(budgets: Sequence[float], samples: Sequence[int] | None = None) -> list[ClientRecord]:
    counts = samples or [10 + n for n in range(len(budgets))]
    return [ClientRecord(n, budget, counts[n]) for n, budget in enumerate(budgets)]


def begin(
    recipe: Recipe, clients: Sequence[ClientRecord], seed: int = 0
) -> tuple[QuantizedMethod, GlobalModel]:
    method = QuantizedMethod(GRAPH, recipe, seed)
    return method, method.start(*state(seed), clients)


def reply(assignment: Assignment, samples: int, train: Train = lambda layers: layers) -> Update:
    """What a client gives back; its codes moved by `train`, its side tensors by its number."""
    layers = train(unpack_layers(GRAPH, assignment.layers))
    side = {name: tensor + np.float32(assignment.client) for name, tensor in assignment.side.items()}
    return Update(
        assignment.round, assignment.client, samples, pack_layers(layers), side, loss=1.0, accuracy=0.5
    )


def nudged(seed: int) -> Train:
    """Codes moved at random by at most one."""

    def train(layers: Layers) -> Layers:
        random = np.random.default_rng(seed)
        moved = {}
        for name, layer in layers.items():
            low = 1 if layer.bits == 8 else 0
            codes = layer.codes.astype(np.int16) + random.integers(-1, 2, layer.codes.shape)
            moved[name] = replace(layer, codes=np.clip(codes, low, 2**layer.bits - 1).astype(np.uint8))
        return moved

    return train


def pruned(layers: Layers) -> Layers:
    """One plane off wherever there are more than two, whatever its density."""
    out = {}
    for name, layer in layers.items():
        codes, bits = layer.codes, layer.bits
        if bits > 2:
            shifted = codes.astype(np.int16) - (1 << (bits - 2))
            codes, bits = np.clip(shifted, 0, (1 << (bits - 1)) - 1).astype(np.uint8), bits - 1
        out[name] = QuantizedLayer(codes, bits, layer.step)
    return out


def one_round(
    method: QuantizedMethod, model: GlobalModel, train: Train = lambda layers: layers
) -> tuple[GlobalModel, list[Update]]:
    updates = [reply(method.assign(model, c), c.samples, train) for c in model.clients]
    return method.merge(model, updates), updates


def assert_same(one: GlobalModel, other: GlobalModel) -> None:
    assert (one.round, one.bit_widths, one.clients) == (other.round, other.bit_widths, other.clients)
    for mine, yours in ((one.weights, other.weights), (one.side, other.side)):
        assert mine.keys() == yours.keys()
        for name in mine:
            assert mine[name].dtype == yours[name].dtype == np.float32
            assert mine[name].tobytes() == yours[name].tobytes(), name


# Dealing


@settings(max_examples=40)
@given(
    st.sampled_from([PAPER, BEST, fedmpq("best", replace(PLAN, lasso=0.0))]),
    st.lists(st.floats(1, 8), min_size=1, max_size=5),
    st.integers(0, 5),
)
def test_a_deal_fits_its_budget_and_leaves_no_bit(recipe: Recipe, budgets: list[float], seed: int) -> None:
    method, model = begin(recipe, records(budgets), seed)
    for client in model.clients:
        widths = method.deal(model, client)
        capacity = Fraction(client.budget) * sum(SIZES)
        used = sum(b * m for b, m in zip(widths, SIZES, strict=True))
        assert used <= capacity
        assert all(1 <= b <= 8 for b in widths)
        assert not any(b < 8 and used + m <= capacity for b, m in zip(widths, SIZES, strict=True))


def test_the_first_round_starts_from_the_weighted_mean_budget() -> None:
    # p = (2*10, 4*30, 8*60) / 620, mean budget (40 + 480 + 3840) / 620 = 7.03
    _, model = begin(PAPER, records([2, 4, 8], [10, 30, 60]))
    assert model.bit_widths == (7,) * len(SIZES)
    assert model.round == 0


def test_aqfl_deals_the_budget_on_every_layer() -> None:
    method, model = begin(aqfl("paper", PLAN), records([1, 2, 4, 6, 8]))
    for client in model.clients:
        assert method.deal(model, client) == (int(client.budget),) * len(SIZES)
    method, model = begin(aqfl("paper", PLAN), records([2.9]))
    assert method.deal(model, model.clients[0]) == (2,) * len(SIZES)


@pytest.mark.parametrize("profile", ["paper", "best"])
def test_fpq8_deals_eight_bits_to_everyone(profile: Profile) -> None:
    method, model = begin(fpq8(profile, PLAN), records([1, 2, 8]))
    for _ in range(2):
        for client in model.clients:
            sent = method.assign(model, client)
            assert bit_widths(GRAPH, sent.layers) == (8,) * len(SIZES)
        model, _ = one_round(method, model, nudged(1))
        assert model.bit_widths == (8,) * len(SIZES)


def test_pruned_bits_stay_pruned_without_dealing_and_come_back_with_it() -> None:
    clients = records([4, 6])
    method, model = begin(ablated("paper", PLAN, "msb"), clients)
    for expected in ((4, 6), (3, 5), (2, 4), (2, 3)):
        for client, bits in zip(model.clients, expected, strict=True):
            assert method.deal(model, client) == (bits,) * len(SIZES)
        model, _ = one_round(method, model, pruned)
    method, model = begin(ablated("paper", PLAN, "msb+deal"), clients)
    for _ in range(3):
        for client in model.clients:
            least_spare = client.budget - max(SIZES) / sum(SIZES)
            assert least_spare < average_bits(method.deal(model, client), SIZES) <= client.budget
        model, _ = one_round(method, model, pruned)


def test_growth_is_what_the_last_round_changed() -> None:
    method, model = begin(PAPER, records([4, 6, 8]))
    assert all(client.growth(len(SIZES)) == (0,) * len(SIZES) for client in model.clients)
    dealt = [method.deal(model, client) for client in model.clients]
    updates = [reply(method.assign(model, c), c.samples, pruned) for c in model.clients[:2]]
    model = method.merge(model, updates)
    for n, client in enumerate(model.clients[:2]):
        assert client.dealt == dealt[n]
        assert client.returned == tuple(b - 1 if b > 2 else b for b in dealt[n])
        assert client.growth(len(SIZES)) == tuple(-1 if b > 2 else 0 for b in dealt[n])
    # Who took no part keeps its record: its growth is that of its own last round.
    assert model.clients[2] == records([4, 6, 8])[2]


def test_a_budget_under_one_bit_is_refused_where_it_is_dealt() -> None:
    method, model = begin(aqfl("paper", PLAN), records([0.5]))
    with pytest.raises(GridError, match=r"bit-width 0 is outside 1\.\.8"):
        method.deal(model, model.clients[0])


# Sending


@pytest.mark.parametrize("recipe", [PAPER, BEST, aqfl("best", PLAN), replace(BEST, per_channel=True)])
def test_the_server_recomputes_exactly_what_it_sent(recipe: Recipe) -> None:
    clients = records([2, 4, 8])
    method, model = begin(recipe, clients)
    model, _ = one_round(method, model, nudged(3))
    sent = [method.assign(model, client) for client in model.clients]
    # Another process, later, from a copy of the state: as after a crash.
    copy = replace(model, weights={name: tensor.copy() for name, tensor in model.weights.items()})
    again = QuantizedMethod(GRAPH, recipe, 0)
    for assignment, client in zip(sent, copy.clients, strict=True):
        packed = pack_layers(again.deployed(copy, client))
        assert packed.keys() == assignment.layers.keys()
        for name, layer in packed.items():
            assert layer.planes.tobytes() == assignment.layers[name].planes.tobytes()
            assert layer.step.tobytes() == assignment.layers[name].step.tobytes()


def test_an_assignment_carries_seed_round_client_and_plan() -> None:
    method, model = begin(PAPER, records([4, 8]), seed=5)
    sent = method.assign(model, model.clients[1])
    assert (sent.seed, sent.round, sent.client, sent.plan) == (5, 1, 1, PAPER.plan)
    model, _ = one_round(method, model)
    assert method.assign(model, model.clients[0]).round == 2


def test_a_layer_is_quantized_once_per_bit_width_and_never_with_old_weights() -> None:
    method, model = begin(PAPER, records([4, 4]))
    quantizer = method.quantizer(model)
    assert quantizer.layer("fc", 3) is quantizer.layer("fc", 3)
    after, _ = one_round(method, model, nudged(2))
    assert method.quantizer(after) is not quantizer
    fresh = QuantizedLayer.from_weights(after.weights["fc"], 3, "max", False)
    assert method.quantizer(after).layer("fc", 3).codes.tobytes() == fresh.codes.tobytes()


def test_the_error_table_is_relative_and_falls_with_the_bits() -> None:
    weights, _ = state(1)
    scaled = {name: tensor * np.float32(64) for name, tensor in weights.items()}
    table = RoundQuantizer(GRAPH, weights, BEST).errors()
    assert table.shape == (len(SIZES), 8)
    assert np.all(np.diff(table, axis=1) < 0)
    for row, node in zip(table, GRAPH.layers, strict=True):
        exact = weights[node.name].astype(np.float64)
        there = QuantizedLayer.from_weights(weights[node.name], 2, "least_error", False).weights()
        assert row[1] == pytest.approx(np.sum((exact - there) ** 2) / np.sum(exact**2), rel=1e-5)
    assert RoundQuantizer(GRAPH, scaled, BEST).errors() == pytest.approx(table, rel=1e-4)


def test_a_layer_of_zeros_has_an_error_and_can_be_dealt() -> None:
    weights, side = state(0)
    weights["conv2"] = np.zeros_like(weights["conv2"])
    method = QuantizedMethod(GRAPH, BEST, 0)
    model = method.start(weights, side, records([3]))
    assert np.isfinite(method.quantizer(model).errors()).all()
    assert average_bits(method.deal(model, model.clients[0]), SIZES) <= 3


# Merging


@pytest.mark.parametrize("recipe", [PAPER, BEST])
def test_updates_are_merged_in_one_pass_and_in_order(recipe: Recipe) -> None:
    clients = records([2, 4, 6])
    method, model = begin(recipe, clients)
    updates = [reply(method.assign(model, c), c.samples, nudged(c.client)) for c in model.clients]
    assert_same(method.merge(model, iter(updates)), method.merge(model, updates))
    for order in itertools.permutations(updates):
        if list(order) != updates:
            with pytest.raises(MergeError, match="merge in order"):
                method.merge(model, order)


def test_models_are_merged_by_budget_times_data() -> None:
    clients = records([2, 8], [30, 10])
    method, model = begin(PAPER, clients)
    merged, updates = one_round(method, model, nudged(4))
    shares = [Fraction(2 * 30, 140), Fraction(8 * 10, 140)]
    for node in GRAPH.layers:
        parts = [unpack_layers(GRAPH, u.layers)[node.name].weights().astype(np.float64) for u in updates]
        expected = sum(float(p) * part for p, part in zip(shares, parts, strict=True))
        assert merged.weights[node.name] == pytest.approx(expected, abs=1e-7)
    for name, tensor in merged.side.items():
        expected = float(shares[1]) * 1.0 + model.side[name].astype(np.float64)
        # Side tensors were sent in half precision.
        assert tensor == pytest.approx(expected, rel=2**-10)
        assert tensor.shape == GRAPH.side_shapes()[name]


def test_the_samples_an_update_reports_are_what_counts() -> None:
    method, model = begin(PAPER, records([4, 4], [100, 100]))
    sent = [method.assign(model, c) for c in model.clients]
    one = method.merge(model, [reply(sent[0], 0), reply(sent[1], 7, nudged(1))])
    other = method.merge(model, [reply(sent[1], 7, nudged(1))])
    for name in one.weights:
        assert one.weights[name].tobytes() == other.weights[name].tobytes()


def test_deltas_are_added_to_the_weights() -> None:
    clients = records([2, 8], [30, 10])
    method, model = begin(DELTAS, clients)
    merged, updates = one_round(method, model, nudged(4))
    shares = [60 / 140, 80 / 140]
    for node in GRAPH.layers:
        expected = model.weights[node.name].astype(np.float64)
        for share, update, client in zip(shares, updates, clients, strict=True):
            returned = unpack_layers(GRAPH, update.layers)[node.name].weights()
            sent = method.deployed(model, client)[node.name].weights()
            expected = expected + share * (returned.astype(np.float64) - sent)
        assert merged.weights[node.name] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "recipe", [DELTAS, replace(BEST, plan=DELTAS.plan), replace(DELTAS, per_channel=True)]
)
def test_without_training_deltas_leave_the_weights_and_models_wear_them_down(recipe: Recipe) -> None:
    clients = records([2, 2, 4, 8])
    method, start = begin(recipe, clients)
    model = start
    for _ in range(5):
        model, _ = one_round(method, model)
    for name, tensor in model.weights.items():
        assert tensor.tobytes() == start.weights[name].tobytes()
    whole, worn = begin(replace(recipe, merge="models"), clients)
    for _ in range(2):
        worn, _ = one_round(whole, worn)
    wear = [np.abs(tensor - start.weights[name]).max() for name, tensor in worn.weights.items()]
    assert min(wear) > 0
    assert max(wear) > 0.01


def test_a_lone_client_gets_back_the_model_it_returned() -> None:
    method, model = begin(PAPER, records([3]))
    merged, (update,) = one_round(method, model, nudged(9))
    for name, layer in unpack_layers(GRAPH, update.layers).items():
        assert merged.weights[name] == pytest.approx(layer.weights(), rel=1e-6)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 50), st.integers(1, 8)), min_size=1, max_size=6))
def test_bit_widths_are_averaged_by_the_same_weights(group: list[tuple[int, int, int]]) -> None:
    """`b = floor(sum p_n b_n + 1/2)` of what comes back; a client may return any width."""
    clients = records([v for v, _, _ in group], [d for _, d, _ in group])
    method, model = begin(PAPER, clients)
    quantizer = method.quantizer(model)
    updates = []
    for client, (_, _, bits) in zip(model.clients, group, strict=True):
        layers = pack_layers(quantizer.layers((bits,) * len(SIZES)))
        updates.append(replace(reply(method.assign(model, client), client.samples), layers=layers))
    total = sum(v * d for v, d, _ in group)
    mean = Fraction(sum(v * d * b for v, d, b in group), total)
    assert method.merge(model, updates).bit_widths == (math.floor(mean + Fraction(1, 2)),) * len(SIZES)


def test_pruned_models_merge_at_their_own_grids() -> None:
    method, model = begin(PAPER, records([6]))
    sent = method.assign(model, model.clients[0])
    layers = {
        name: QuantizedLayer(*prune_msb(layer.codes, layer.bits, 1.0), layer.step)
        for name, layer in unpack_layers(GRAPH, sent.layers).items()
    }
    update = replace(reply(sent, 5), layers=pack_layers(layers))
    merged = method.merge(model, [update])
    for name, layer in layers.items():
        assert layer.bits <= 2
        assert merged.weights[name] == pytest.approx(layer.weights(), rel=1e-6)


def test_merging_leaves_the_old_model_alone() -> None:
    method, model = begin(BEST, records([2, 8]))
    before = {name: tensor.copy() for name, tensor in (model.weights | model.side).items()}
    one_round(method, model, nudged(5))
    assert all(
        tensor.tobytes() == before[name].tobytes() for name, tensor in (model.weights | model.side).items()
    )
    assert model.round == 0


def refused(updates: Callable[[list[Update]], Iterable[Update]], message: str) -> None:
    method, model = begin(PAPER, records([4, 8]))
    sent = [reply(method.assign(model, c), c.samples) for c in model.clients]
    with pytest.raises(MergeError, match=message):
        method.merge(model, updates(sent))


def test_updates_that_do_not_belong_are_refused() -> None:
    refused(lambda sent: [], "no client has any samples")
    refused(lambda sent: [*sent, sent[1]], "client 1 sent two updates")
    refused(lambda sent: [replace(sent[0], client=7)], "client 7, which this run does not have")
    refused(lambda sent: [replace(sent[1], round=2)], "client 1 is of round 2, not 1")
    broken = np.array([np.nan] * 6, np.float32)
    refused(
        lambda sent: [replace(sent[0], side=sent[0].side | {"bn1.weight": broken})],
        "'bn1.weight' holds a NaN",
    )


# Selecting


def test_selection_is_by_seed_and_round_alone() -> None:
    clients = records([4] * 10)
    chosen = select_clients(clients, 3, 1, 5)
    assert chosen == select_clients(clients, 3, 1, 5)
    assert [c.client for c in chosen] == sorted(c.client for c in chosen)
    assert len({c.client for c in chosen}) == 5
    others = [select_clients(clients, seed, number, 5) for seed, number in ((4, 1), (3, 2))]
    assert all(other != chosen for other in others)


def test_every_client_is_selected_about_as_often() -> None:
    clients, rounds = records([4] * 10), 2000
    counts = np.zeros(10)
    for number in range(1, rounds + 1):
        for client in select_clients(clients, 0, number, 3):
            counts[client.client] += 1
    # Binomial(2000, 0.3): deviation 20.5
    assert np.abs(counts - 600).max() < 4.5 * 20.5


def test_a_selection_of_none_or_too_many_is_refused() -> None:
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"cannot select {count} of 2 clients"):
            select_clients(records([4, 4]), 0, 1, count)
    assert len(select_clients(records([4, 4]), 0, 1, 2)) == 2
