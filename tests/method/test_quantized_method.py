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

from fedmpq.exchange.messages import (
    Assignment,
    Calibration,
    TrainingPlan,
    Update,
    bit_widths,
    pack_layers,
    rounded_side,
    unpack_layers,
)
from fedmpq.method.aggregate import MergeError
from fedmpq.method.pruning_growing import deal_best
from fedmpq.method.quantized_method import QuantizedMethod, select_clients
from fedmpq.method.recipe import Profile, Recipe, ablated, aqfl, fedmpq, fpq8
from fedmpq.method.round_quantizer import RoundQuantizer
from fedmpq.method.state import Average, ClientRecord, GlobalModel
from fedmpq.model.batch_statistics import quantized_statistics
from fedmpq.model.calibration import statistics_names
from fedmpq.model.grid import GridError
from fedmpq.model.pruning import prune_msb
from fedmpq.model.quantized import Layers, QuantizedLayer, Side, Weights, average_bits, dequantize_all
from tests.server.small_model import GRAPH, first_state

PLAN = TrainingPlan()
PAPER, BEST = fedmpq("paper", PLAN), fedmpq("best", PLAN)
DELTAS = replace(PAPER, merge="deltas", plan=replace(PAPER.plan, prune_density=None))
Train = Callable[[Layers], Layers]
SIZES = GRAPH.layer_sizes


def records(budgets: Sequence[float], samples: Sequence[int] | None = None) -> list[ClientRecord]:
    counts = samples or [10 + n for n in range(len(budgets))]
    return [ClientRecord(n, budget, counts[n]) for n, budget in enumerate(budgets)]


def begin(
    recipe: Recipe, clients: Sequence[ClientRecord], seed: int = 0
) -> tuple[QuantizedMethod, GlobalModel]:
    method = QuantizedMethod(GRAPH, recipe, seed)
    return method, method.start(*first_state(seed), clients)


def reply(assignment: Assignment, samples: int, train: Train = lambda layers: layers) -> Update:
    """What a client gives back; its codes moved by `train`, its side tensors by its number.

    Under the carried rule the codes are those of a change, which has whole numbers for steps.
    """
    layers = train(unpack_layers(GRAPH, assignment.layers))
    if assignment.plan.update == "carried":
        layers = {
            name: replace(layer, step=np.full_like(layer.step, 3 + assignment.client))
            for name, layer in layers.items()
        }
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


def assert_same_tensors(mine: Side, yours: Side) -> None:
    assert mine.keys() == yours.keys()
    for name in mine:
        assert mine[name].dtype == yours[name].dtype == np.float32
        assert mine[name].tobytes() == yours[name].tobytes(), name


def assert_same(one: GlobalModel, other: GlobalModel) -> None:
    assert (one.round, one.bit_widths, one.clients) == (other.round, other.bit_widths, other.clients)
    assert (one.average is None) == (other.average is None)
    assert_same_tensors(one.weights, other.weights)
    assert_same_tensors(one.side, other.side)
    if one.average is not None and other.average is not None:
        assert_same_tensors(one.average.weights, other.average.weights)
        assert_same_tensors(one.average.side, other.average.side)


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
        most = 6 if recipe.deal == "least_error" and client.budget <= 6 else 8
        assert all(1 <= b <= most for b in widths)
        assert not any(b < most and used + m <= capacity for b, m in zip(widths, SIZES, strict=True))


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
        widths, quantizer = again.deal(copy, client), again.quantizer(copy)
        packed = pack_layers(quantizer.layers(widths))
        assert packed.keys() == assignment.layers.keys()
        for name, layer in packed.items():
            assert layer.planes.tobytes() == assignment.layers[name].planes.tobytes()
            assert layer.step.tobytes() == assignment.layers[name].step.tobytes()
        assert_same_tensors(quantizer.sent_side(widths), assignment.side)


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


def test_quantizers_of_the_trained_and_of_the_final_model_are_both_kept() -> None:
    method, model = begin(BEST, records([4, 4]))
    for _ in range(2):
        model, _ = one_round(method, model, nudged(2))
    trained, final = method.quantizer(model), method.quantizer(model.final)
    assert trained is not final
    assert method.quantizer(model) is trained
    assert method.quantizer(model.final) is final


def test_what_devices_run_after_a_calibration_has_its_statistics() -> None:
    method, model = begin(BEST, records([4, 4]))
    model, _ = one_round(method, model, nudged(2))
    before = method.calibration(model, model.clients[0])
    statistics = {name: np.full_like(model.side[name], 7.0) for name in statistics_names(GRAPH)}
    after = method.calibrated(model, [Calibration(1, 0, 10, statistics)])
    fresh = QuantizedMethod(GRAPH, BEST, method.seed)
    (mine,), (its,) = (each.deployments(after, after.clients) for each in (method, fresh))
    assert_same_tensors(mine.side, its.side)
    assert mine.side["bn1.running_mean"].tolist() != before.side["bn1.running_mean"].tolist()
    # The layers are not quantized again for that.
    (old,) = method.deployments(model, model.clients)
    assert old.layers["fc"] is mine.layers["fc"]


def moved(weights: Weights, layers: Layers, side: Side) -> Side:
    return quantized_statistics(GRAPH, weights, dequantize_all(layers), side)


@pytest.mark.parametrize("side_bits", [16, 32])
def test_statistics_are_sent_as_the_clients_own_bit_widths_move_them(side_bits: int) -> None:
    recipe = replace(BEST, plan=replace(BEST.plan, side_bits=side_bits))
    method, model = begin(recipe, records([2, 8]))
    model, _ = one_round(method, model, nudged(2))
    sent = [method.assign(model, client) for client in model.clients]
    for assignment in sent:
        expected = moved(model.weights, unpack_layers(GRAPH, assignment.layers), model.side)
        assert_same_tensors(assignment.side, rounded_side(expected, side_bits))
    for name in model.side:
        # The image has mean zero, so the mean behind the first layer stays.
        moves = name.endswith(("running_mean", "running_var")) and name != "bn1.running_mean"
        assert (sent[0].side[name].tobytes() != sent[1].side[name].tobytes()) == moves, name
    narrow, wide = (
        float(np.abs(assignment.side["bn2.running_var"] - model.side["bn2.running_var"]).max())
        for assignment in sent
    )
    assert wide < 0.01 < narrow


@pytest.mark.parametrize("recipe", [PAPER, replace(BEST, statistics="averaged")])
def test_statistics_are_sent_as_they_are_where_none_are_moved(recipe: Recipe) -> None:
    method, model = begin(recipe, records([2, 8]))
    for client in model.clients:
        assert_same_tensors(method.assign(model, client).side, rounded_side(model.side, 16))
    assert all(each.side is model.side for each in method.deployments(model, model.clients))


def test_the_error_table_is_relative_and_falls_with_the_bits() -> None:
    weights, side = first_state(1)
    scaled = {name: tensor * np.float32(64) for name, tensor in weights.items()}
    table = RoundQuantizer(GRAPH, weights, side, BEST).errors()
    assert table.shape == (len(SIZES), 8)
    assert np.all(np.diff(table, axis=1) < 0)
    for row, node in zip(table, GRAPH.layers, strict=True):
        exact = weights[node.name].astype(np.float64)
        there = QuantizedLayer.from_weights(weights[node.name], 2, "least_error", False).weights()
        assert row[1] == pytest.approx(np.sum((exact - there) ** 2) / np.sum(exact**2), rel=1e-5)
    assert RoundQuantizer(GRAPH, scaled, side, BEST).errors() == pytest.approx(table, rel=1e-4)


def test_a_layer_of_zeros_has_an_error_and_can_be_dealt() -> None:
    weights, side = first_state(0)
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


@pytest.mark.parametrize("profile", ["paper", "best"])
def test_fpq8_merges_by_data_alone_whatever_the_budgets(profile: Profile) -> None:
    """Everyone trains with 8 bits, so that `v_n` is the same for all."""
    ends = []
    for budgets in ([2, 8], [8, 8]):
        method, model = begin(fpq8(profile, PLAN), records(budgets, [30, 10]))
        assert model.bit_widths == (8,) * len(SIZES)
        merged, _ = one_round(method, model, nudged(4))
        # The clients' side tensors differ by one, a quarter of the data has the greater ones.
        for name, tensor in merged.side.items():
            assert tensor == pytest.approx(method.assign(model, model.clients[0]).side[name] + 0.25, rel=1e-6)
        ends.append(merged)
    assert_same_tensors(ends[0].weights, ends[1].weights)
    assert_same_tensors(ends[0].side, ends[1].side)


def test_the_samples_an_update_reports_are_what_counts() -> None:
    method, model = begin(PAPER, records([4, 4], [100, 100]))
    sent = [method.assign(model, c) for c in model.clients]
    one = method.merge(model, [reply(sent[0], 0), reply(sent[1], 7, nudged(1))])
    other = method.merge(model, [reply(sent[1], 7, nudged(1))])
    for name in one.weights:
        assert one.weights[name].tobytes() == other.weights[name].tobytes()


def test_a_merge_goes_by_what_was_dealt_where_that_is_on_record() -> None:
    """The changes are those from the codes that were sent, whatever would be dealt now."""
    method, model = begin(DELTAS, records([4, 4]))
    widths = (5, 2, 3)
    layers = method.quantizer(model).layers(widths)
    assert widths != method.deal(model, model.clients[0])
    sent = replace(method.assign(model, model.clients[0]), layers=pack_layers(layers))
    merged = method.merge(replace(model, dealt={0: widths}), [reply(sent, 10, nudged(1))])
    assert merged.clients[0].dealt == merged.clients[0].returned == widths
    for name, layer in nudged(1)(layers).items():
        change = layer.weights().astype(np.float64) - layers[name].weights()
        np.testing.assert_allclose(merged.weights[name], model.weights[name] + change, atol=1e-6)
    assert merged.dealt == {}, "nobody was sent the new model yet"


def test_deltas_are_added_to_the_weights() -> None:
    clients = records([2, 8], [30, 10])
    method, model = begin(DELTAS, clients)
    merged, updates = one_round(method, model, nudged(4))
    shares = [60 / 140, 80 / 140]
    for node in GRAPH.layers:
        expected = model.weights[node.name].astype(np.float64)
        for share, update, client in zip(shares, updates, clients, strict=True):
            returned = unpack_layers(GRAPH, update.layers)[node.name].weights()
            sent = method.quantizer(model).layers(method.deal(model, client))[node.name].weights()
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
    refused(lambda sent: [replace(sent[0], client=7)], "client 7: this run does not have that client")
    refused(lambda sent: [replace(sent[1], round=2)], "client 1 is of round 2, not 1")
    broken = np.array([np.nan] * 6, np.float32)
    refused(
        lambda sent: [replace(sent[0], side=sent[0].side | {"bn1.weight": broken})],
        "'bn1.weight' holds a NaN",
    )


# Averaging


def rounds_of(recipe: Recipe, count: int) -> tuple[QuantizedMethod, list[GlobalModel]]:
    """The models after each of so many rounds, each with other training."""
    method, model = begin(recipe, records([2, 4, 8]))
    models = []
    for number in range(count):
        model, _ = one_round(method, model, nudged(number))
        models.append(model)
    return method, models


def average_of(model: GlobalModel) -> Average:
    assert model.average is not None
    return model.average


def slow_average(newest_last: Sequence[Side], averaging: float) -> Side:
    """The weighted mean of every tensor in exact arithmetic but for the last rounding: `d^k` for the model of
    `k` rounds ago, or `k (k + 1) ... (k + p - 1)` for that of round `k`."""
    rounds = range(len(newest_last), 0, -1)
    shares = [Fraction(averaging) ** age for age in range(len(newest_last))]
    if averaging >= 1:
        shares = [Fraction(math.prod(range(k, k + int(averaging)))) for k in rounds]
    out = {}
    for name, tensor in newest_last[-1].items():
        flat = []
        for place in range(tensor.size):
            values = [Fraction(float(each[name].flat[place])) for each in reversed(newest_last)]
            flat.append(float(sum(d * v for d, v in zip(shares, values, strict=True)) / sum(shares)))
        out[name] = np.array(flat, np.float32).reshape(tensor.shape)
    return out


@pytest.mark.parametrize(
    "recipe",
    [
        BEST,
        replace(BEST, averaging=0.25, statistics="averaged"),
        replace(PAPER, averaging=0.95),
        replace(BEST, averaging=0.8),
        aqfl("best", PLAN),
    ],
)
def test_the_average_is_that_of_all_rounds_by_their_weights(recipe: Recipe) -> None:
    _, models = rounds_of(recipe, 6)
    assert_same_tensors(average_of(models[0]).weights, models[0].weights)
    assert_same_tensors(average_of(models[0]).side, models[0].side)
    for t in range(1, len(models) + 1):
        average = average_of(models[t - 1])
        for found, history in (
            (average.weights, [model.weights for model in models[:t]]),
            (average.side, [model.side for model in models[:t]]),
        ):
            expected = slow_average(history, recipe.averaging)
            assert found.keys() == expected.keys()
            for name, tensor in found.items():
                assert tensor.dtype == np.float32
                assert tensor.shape == expected[name].shape
                np.testing.assert_allclose(tensor, expected[name], rtol=2e-6, atol=2e-6, err_msg=name)
    # And it is no mere copy of the newest.
    assert any(
        average_of(models[-1]).weights[n].tobytes() != t.tobytes() for n, t in models[-1].weights.items()
    )


@pytest.mark.parametrize("recipe", [PAPER, replace(BEST, averaging=0.0)])
def test_without_averaging_the_model_itself_is_final(recipe: Recipe) -> None:
    _, models = rounds_of(recipe, 3)
    assert all(model.average is None for model in models)
    assert all(model.final is model for model in models)


def test_before_the_first_round_there_is_nothing_to_average() -> None:
    _, model = begin(BEST, records([2, 4]))
    assert model.average is None
    assert model.final is model


def test_training_goes_on_from_the_model_and_not_from_its_average() -> None:
    method, averaged = rounds_of(BEST, 4)
    plain_method, plain = rounds_of(replace(BEST, averaging=0.0), 4)
    for one, other in zip(averaged, plain, strict=True):
        assert_same(replace(one, average=None), other)
        for client in one.clients:
            mine, yours = method.assign(one, client), plain_method.assign(other, client)
            assert_same_tensors(mine.side, yours.side)
            assert all(
                layer.planes.tobytes() == yours.layers[name].planes.tobytes()
                for name, layer in mine.layers.items()
            )


def test_the_final_model_is_the_average_and_the_rest_as_it_was() -> None:
    _, models = rounds_of(BEST, 3)
    model, average = models[-1], average_of(models[-1])
    final = model.final
    assert final.weights is average.weights
    assert final.side is average.side
    assert (final.round, final.bit_widths, final.clients) == (model.round, model.bit_widths, model.clients)
    assert final.average is None
    assert final.final is final


def test_devices_run_the_average_with_its_own_statistics() -> None:
    clients = records([4, 2, 4, 8, 2])
    method, model = begin(BEST, clients)
    for number in range(3):
        model, _ = one_round(method, model, nudged(number))
    average = average_of(model)
    errors = RoundQuantizer(GRAPH, average.weights, average.side, BEST).errors()
    found = method.deployments(model, model.clients)
    assert [[client.client for client in each.clients] for each in found] == [[0, 2], [1, 4], [3]]
    for each in found:
        assert each.widths == deal_best(SIZES, errors, each.clients[0].budget)
        layers = {
            node.name: QuantizedLayer.from_weights(average.weights[node.name], bits, "least_error", False)
            for node, bits in zip(GRAPH.layers, each.widths, strict=True)
        }
        for name, layer in layers.items():
            assert each.layers[name].codes.tobytes() == layer.codes.tobytes()
            assert each.layers[name].step.tobytes() == layer.step.tobytes()
        assert_same_tensors(each.side, moved(average.weights, layers, average.side))
    # Any others may ask for theirs.
    (own,) = method.deployments(model, [ClientRecord(-1, 8.0, 1)])
    assert own.widths == found[2].widths


def test_devices_run_the_model_itself_where_there_is_no_average() -> None:
    method, models = rounds_of(replace(BEST, averaging=0.0), 2)
    model = models[-1]
    for each in method.deployments(model, model.clients):
        (client,) = each.clients
        assert each.widths == method.deal(model, client)
        sent = unpack_layers(GRAPH, method.assign(model, client).layers)
        assert all(layer.codes.tobytes() == sent[name].codes.tobytes() for name, layer in each.layers.items())
        assert_same_tensors(each.side, moved(model.weights, sent, model.side))


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
