"""Which methods a server conducts, and that a round goes by what its seats say was dealt."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fedmpq.method.quantized_method import QuantizedMethod
from fedmpq.method.state import ClientRecord
from fedmpq.server.run_config import ConfigError
from fedmpq.server.served_method import served_method
from tests.server import own_methods
from tests.server.loopback import calibration_of, federation, run_all, same_model, small_config, update_of
from tests.server.small_model import GRAPH, first_state


@pytest.mark.parametrize("statistics", ["averaged", "calibrated"])
def test_answers_are_checked_and_merged_by_the_widths_of_their_seats(tmp_path: Path, statistics: str) -> None:
    """Even where the method would deal otherwise if it were asked again."""

    async def scenario() -> None:
        async with federation(tmp_path) as server:
            name = f"{own_methods.__name__}:Fickle"
            config = small_config(
                clients_per_round=3, rounds=1, profile="best", method=name, statistics=statistics
            )
            run = server.queue(config)
            clients = await server.clients(4, 4, 4)
            assert await run_all(clients) == ["finished"] * 3
            dealt = {seat.client: seat.bit_widths for seat in server.store.round(run.run_id, 1).seats}
            assert len(set(dealt.values())) == 3
            assert {one.client: one.record.dealt for one in server.store.members(run.run_id)} == dealt
            method = own_methods.Fixed(GRAPH, config.recipe(), config.seed)
            method.widths = dealt
            records = [ClientRecord(n, c.budget, c.samples) for n, c in enumerate(clients)]
            model = method.start(*first_state(), records)
            model = method.merge(model, [update_of(method, model, record) for record in records])
            if (measured := server.store.calibration(run.run_id, 1)) is not None:
                method.widths = {seat.client: seat.bit_widths for seat in measured.seats}
                model = method.calibrated(model, [calibration_of(1, record) for record in records])
            assert (measured is not None) == (statistics == "calibrated")
            assert same_model(server.model(), model)

    asyncio.run(scenario())


def test_the_method_is_the_one_that_the_settings_name() -> None:
    assert type(served_method(small_config(), GRAPH)) is QuantizedMethod
    own = served_method(small_config(method=f"{own_methods.__name__}:Fickle"), GRAPH)
    assert type(own) is own_methods.Fickle


def test_a_merge_of_one_s_own_is_not_asynchronous() -> None:
    config = small_config(method=f"{own_methods.__name__}:Picky", asynchronous=2)
    with pytest.raises(ConfigError, match="Picky merges by itself, and does not go with asynchronous"):
        served_method(config, GRAPH)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            f"{own_methods.__name__}:Foreign",
            "a Foreign, .* not served: .* derive the class",
        ),
        (f"{own_methods.__name__}:Nobody", "cannot be imported"),
    ],
)
def test_a_method_that_cannot_be_served_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        served_method(small_config(method=name), GRAPH)
