"""Facts for a store to keep: what the tests of the store put into it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import TypeVar

from fedmpq.method.state import ClientRecord
from fedmpq.server.claim_limits import UNLIMITED, ClaimLimits
from fedmpq.server.store.errors import UpdateRefused
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import (
    Answered,
    CalibrationCommit,
    CalibrationRound,
    Client,
    Described,
    Member,
    RoundAddress,
    Run,
    Seat,
    TrainingCommit,
    TrainingRound,
)
from fedmpq.server.tokens import make_token

NOW = 1_700_000_000.0
MOMENT = datetime.fromtimestamp(NOW, timezone.utc)
T = TypeVar("T")


def add_token(
    store: Store,
    uses: int | None = 1,
    days: float | None = None,
    name: str | None = None,
    limits: ClaimLimits = UNLIMITED,
) -> bytes:
    token = make_token(MOMENT, uses=uses, days=days, client_name=name, limits=limits)
    store.add_token(token.record)
    return token.record.digest


def enrol(store: Store, token: bytes, name: str, secret: bytes = b"s" * 32, now: float = NOW) -> str:
    return store.enrol(token, name, 4.0, "1", secret, None, now)


def at_once(work: Callable[[int], T], count: int) -> list[T]:
    results: list[T] = []
    barrier = threading.Barrier(count)

    def one(number: int) -> None:
        barrier.wait()
        results.append(work(number))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == count
    return results


def queue(store: Store, name: str = "run") -> Run:
    return store.queue_run(name, {"rounds": 2}, ["cat", "dog"], b"g" * 32, b"m" * 32, NOW)


def seat(client: int, payload: bytes = b"p" * 32) -> Seat:
    return Seat(client, (4, 4, 4), payload, 1000)


def member(client: int, client_id: str, budget: float = 4.0, samples: int = 10) -> Member:
    return Member(client_id, ClientRecord(client, budget, samples))


def opened(store: Store, run: Run, clients: int = 2, number: int = 1) -> TrainingRound:
    """Round `number` with these clients in it, who join the run in its first."""
    members = [replace(one, record=replace(one.record, samples=20)) for one in store.members(run.run_id)]
    if number == 1:
        token = add_token(store, uses=None)
        ids = [enrol(store, token, f"{run.name}-{n}") for n in range(clients)]
        members = [member(n, client_id, samples=10 + n) for n, client_id in enumerate(ids)]
    return store.open_round(
        run.run_id,
        number,
        target=clients,
        deadline=None,
        bit_widths=(4, 4, 4),
        members=members,
        seats=[seat(n) for n in range(clients)],
        now=NOW,
    )


def commit(
    number: int, last: bool = False, model: bytes = b"n" * 32, keep: int = 1, ready: bool = True
) -> TrainingCommit:
    records = [ClientRecord(n, 4.0, 10, (4, 4, 4), (3, 4, 4)) for n in range(2)]
    return TrainingCommit(
        round=number,
        last=last,
        ready=ready,
        model=model,
        bit_widths=(4, 4, 3),
        records=records,
        accuracies={0: 0.5},
        bytes_up={0: 7, 1: 8},
        bytes_down={0: 9, 1: 10},
        metrics={"loss": 1.0},
        keep_models=keep,
    )


def calibrated(number: int, last: bool = False, model: bytes = b"c" * 32) -> CalibrationCommit:
    return CalibrationCommit(
        round=number,
        last=last,
        model=model,
        accuracies={1: 0.75},
        bytes_up={0: 1},
        bytes_down={0: 2, 1: 3},
        metrics={"loss": 1.0, "calibrated_by": 1},
        keep_models=1,
    )


def open_calibration(store: Store, run: Run, number: int = 1) -> CalibrationRound:
    return store.open_calibration(run.run_id, number, deadline=NOW + 5, seats=[seat(0), seat(1)], now=NOW)


def add_answer(store: Store, address: RoundAddress, client: int, payload: bytes, size: int) -> str:
    """One answer alone; its receipt."""
    (receipt,) = store.add_answers(address, [Answered(client, payload, size)])
    if isinstance(receipt, UpdateRefused):
        raise receipt
    return receipt


def describe(
    store: Store, client_id: str, budget: float, samples: int, version: str, engine: str, now: float
) -> Client:
    """What one client says of itself."""
    (client,) = store.describe_clients([Described(client_id, budget, samples, version, engine)], now)
    return client
