"""When a board may work: what is read of it, and what the server hears while it may not."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from fedmpq.edge_client.conditions import (
    Conditions,
    ConditionsError,
    Machine,
    NotNow,
    read_conditions,
)
from fedmpq.edge_client.session import Board
from tests.edge_client.scene import Scene, info, scene, until

__all__ = ["info", "scene"]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A phone at 40 degrees, on mains, at 23:30."""
    for name, values in {
        "class/power_supply/battery": {"type": "Battery", "capacity": "80"},
        "class/power_supply/usb": {"type": "USB", "online": "1"},
        "class/thermal/thermal_zone0": {"temp": "40000"},
        "class/thermal/thermal_zone1": {"temp": "35500"},
    }.items():
        folder = tmp_path / "sys" / name
        folder.mkdir(parents=True)
        for file, text in values.items():
            (folder / file).write_text(f"{text}\n", encoding="utf-8")
    return Machine(tmp_path / "sys", tmp_path, lambda: 23 * 60 + 30, lambda: 0.5, lambda: 1 << 30)


def conditions(machine: Machine, text: str) -> Conditions:
    path = machine.folder / "board.conf"
    path.write_text(f"[conditions]\n{text}\n", encoding="utf-8")
    return read_conditions(path, machine)


EVERYTHING = """hours = 22:00-06:00, 12:00-13:00
mains_power = yes
max_temperature = 70   # degrees
max_load = 1.5
min_free_memory = 300M
min_free_disk = 1M"""


def test_all_conditions_hold(machine: Machine) -> None:
    found = conditions(machine, EVERYTHING)
    assert found.hours == ((1320, 360), (720, 780))
    assert (found.mains_power, found.max_temperature, found.min_free_disk) == (True, 70.0, 1 << 20)
    assert found.unmet() == ""
    assert Conditions(machine=machine).unmet() == ""


@pytest.mark.parametrize(
    ("minute", "may"),
    [(0, True), (359, True), (360, False), (719, False), (720, True), (1319, False), (1320, True)],
)
def test_hours_go_over_midnight(machine: Machine, minute: int, may: bool) -> None:
    found = conditions(replace(machine, minute=lambda: minute), "hours = 22:00-06:00, 12:00-13:00")
    assert (found.unmet() == "") == may
    if not may:
        assert found.unmet() == "not at this hour, but 22:00-06:00, 12:00-13:00"


def test_the_first_that_does_not_hold_is_named(machine: Machine) -> None:
    found = conditions(machine, EVERYTHING)
    assert (
        replace(found, machine=replace(machine, load=lambda: 3.0)).unmet() == "a load of 3.0, more than 1.5"
    )
    # What the round takes itself is not held against it.
    assert replace(found, machine=replace(machine, load=lambda: 3.0)).unmet(at_work=True) == ""
    little = replace(found, machine=replace(machine, memory=lambda: 10 << 20))
    assert "of memory free" in little.unmet()
    assert "free on the disk" in replace(found, min_free_disk=1 << 60).unmet()
    assert replace(found, max_temperature=39.0).unmet() == "40 degrees, more than 39"
    (machine.sys / "class" / "power_supply" / "usb" / "online").write_text("0")
    assert found.unmet(at_work=True) == "on battery"
    (machine.sys / "class" / "power_supply" / "battery" / "type").write_text("Unknown")
    assert found.unmet() == "", "what has no battery is on mains"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = red", "there is no condition 'colour'"),
        ("hours = 25:00-06:00", "write 22:00-06:00"),
        ("hours = at night", "write 22:00-06:00"),
        ("mains_power = maybe", "write yes or no"),
        ("max_load = -1", "give a number above 0"),
        ("max_temperature = warm", "give a number above 0"),
        ("min_free_disk = much", "min_free_disk|much"),
    ],
)
def test_conditions_that_cannot_be_are_named(machine: Machine, text: str, words: str) -> None:
    with pytest.raises(ConditionsError, match=words):
        conditions(machine, text)


def test_a_file_that_is_none_is_named(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "a.conf").write_text("[other]\nx = 1\n")
    with pytest.raises(ConditionsError, match=r"no section \[conditions\]"):
        read_conditions(tmp_path / "a.conf", machine)
    (tmp_path / "b.conf").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConditionsError, match="cannot be read"):
        read_conditions(tmp_path / "b.conf", machine)


def test_work_is_broken_off_when_a_condition_ends(machine: Machine) -> None:
    found, ended = conditions(machine, "mains_power = yes"), []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def scenario() -> None:
        task = asyncio.ensure_future(found.during(work(), seconds=0.01))
        await asyncio.sleep(0.1)
        (machine.sys / "class" / "power_supply" / "usb" / "online").write_text("0")
        with pytest.raises(NotNow, match="on battery"):
            await task
        with pytest.raises(NotNow, match="on battery"):
            await found.during(work(), seconds=0.01)

    asyncio.run(scenario())
    assert ended == [True], "the second never began"


def test_a_board_that_may_not_work_says_not_now_and_comes_back(
    scene: Scene, machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real channel: the refusal, then a new stream once the mains are back, and the update."""
    monkeypatch.setattr(Conditions.until_met, "__defaults__", (0.05,))
    found = conditions(machine, "mains_power = yes")
    monkeypatch.setattr("tests.edge_client.scene.Board", partial(Board, conditions=found))
    online = machine.sys / "class" / "power_supply" / "usb" / "online"
    online.write_text("0")
    scene.federation.on_stream = scene.work.offer(scene.federation)

    async def scenario() -> None:
        async with scene.board() as task:
            await until(lambda: bool(scene.federation.declined))
            assert scene.federation.declined[0].reason == "not now: on battery"
            assert not scene.federation.receipts
            streams = len(scene.federation.hellos)
            online.write_text("1")
            await until(lambda: bool(scene.federation.receipts))
            assert len(scene.federation.hellos) == streams + 1, "the new stream says that it may again"
            assert not task.done()

    with caplog.at_level(logging.INFO, "fedmpq.client"):
        scene.play(scenario)
    assert "round 1: not now: on battery" in caplog.text
    assert "this board may work again" in caplog.text
