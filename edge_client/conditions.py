"""When this board may work for the federation: a file with a section [conditions], in lines `name = value`.

    [conditions]
    hours = 22:00-06:00, 12:00-13:00
    mains_power = yes
    max_temperature = 70
    max_load = 1.5
    min_free_memory = 300M
    min_free_disk = 1G
    unmetered = yes

They are looked at before a round and, but for load and memory, which the round itself takes, every half a
minute while it is at work. A board that may not work says "not now" to the server, which gives the place to
another, and comes back by itself.
"""

from __future__ import annotations

import asyncio
import configparser
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from fedmpq.system.free_disk import free_bytes
from fedmpq.system.memory import available_memory, parse_size, size_text

SECTION = "conditions"
LOOK_SECONDS = 30.0
_SPAN = re.compile(r"(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)")
_Result = TypeVar("_Result")


class ConditionsError(ValueError):
    """A file of conditions that cannot be."""


class NotNow(Exception):
    """Why this board may not work at the moment."""


@dataclass(frozen=True)
class Machine:
    """What is read of this board; tests give other folders and clocks."""

    sys: Path = Path("/sys")
    folder: Path = field(default_factory=Path)
    """Whose file system must have space."""
    minute: Callable[[], int] = lambda: time.localtime().tm_hour * 60 + time.localtime().tm_min
    """Of the day, by local time."""
    load: Callable[[], float] = lambda: os.getloadavg()[0]
    memory: Callable[[], int] = available_memory

    def on_mains(self) -> bool:
        """A board without a battery is."""
        supplies = list((self.sys / "class" / "power_supply").glob("*"))
        kinds = [(_text(supply / "type"), _text(supply / "online")) for supply in supplies]
        if not any(kind == "Battery" for kind, _ in kinds):
            return True
        return any(kind in ("Mains", "USB", "Wireless") and online == "1" for kind, online in kinds)

    def temperature(self) -> float | None:
        """The hottest sensor's degrees; None: there is none."""
        zones = (self.sys / "class" / "thermal").glob("thermal_zone*/temp")
        found = [int(text) / 1000 for text in map(_text, zones) if text.lstrip("-").isdecimal()]
        return max(found, default=None)

    def free_disk(self) -> int:
        return free_bytes(self.folder)

    def metered(self) -> bool:
        """By NetworkManager, which knows or guesses it."""
        words = ["nmcli", "--terse", "--fields", "GENERAL.METERED", "device", "show"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
        return any(line.partition(":")[2].startswith("yes") for line in done.stdout.splitlines())


@dataclass(frozen=True)
class Conditions:
    """All of them must hold; what is not given always does."""

    hours: tuple[tuple[int, int], ...] = ()
    """From which minute of the day to which; one that ends before it begins goes over midnight."""
    mains_power: bool = False
    max_temperature: float | None = None
    max_load: float | None = None
    min_free_memory: int | None = None
    min_free_disk: int | None = None
    unmetered: bool = False
    machine: Machine = field(default_factory=Machine)

    def unmet(self, *, at_work: bool = False) -> str:
        """The first that does not hold, in words; empty: all do."""
        machine = self.machine
        if self.hours and not any(_within(machine.minute(), span) for span in self.hours):
            return f"not at this hour, but {', '.join(map(_span_text, self.hours))}"
        if self.mains_power and not machine.on_mains():
            return "on battery"
        heat = machine.temperature() if self.max_temperature is not None else None
        if heat is not None and self.max_temperature is not None and heat > self.max_temperature:
            return f"{heat:.0f} degrees, more than {self.max_temperature:g}"
        if self.min_free_disk is not None and machine.free_disk() < self.min_free_disk:
            return f"less than {size_text(self.min_free_disk)} free on the disk"
        if self.unmetered and machine.metered():
            return "the network is metered"
        return "" if at_work else self._unmet_by_others()

    def _unmet_by_others(self) -> str:
        """Of what a round takes itself once it is at work."""
        load = self.machine.load() if self.max_load is not None else 0.0
        if self.max_load is not None and load > self.max_load:
            return f"a load of {load:.1f}, more than {self.max_load:g}"
        if self.min_free_memory is not None and self.machine.memory() < self.min_free_memory:
            return f"less than {size_text(self.min_free_memory)} of memory free"
        return ""

    async def during(self, work: Coroutine[Any, Any, _Result], seconds: float = LOOK_SECONDS) -> _Result:
        """What the work gives; `NotNow` if it may not begin, or has to be broken off."""
        if reason := await asyncio.to_thread(self.unmet):
            work.close()
            raise NotNow(reason)
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=seconds))[0]:
                if reason := await asyncio.to_thread(self.unmet, at_work=True):
                    raise NotNow(reason)
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def until_met(self, seconds: float = LOOK_SECONDS) -> None:
        while await asyncio.to_thread(self.unmet):
            await asyncio.sleep(seconds)


def read_conditions(path: Path, machine: Machine) -> Conditions:
    """The section of a file, checked."""
    parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=("#",))
    try:
        with path.open(encoding="utf-8") as file:
            parser.read_file(file, str(path))
        if not parser.has_section(SECTION):
            raise ConditionsError(f"{path} has no section [{SECTION}]")
        values = {name: _value(name, text.strip().strip('"')) for name, text in parser.items(SECTION)}
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConditionsError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    except ConditionsError:
        raise
    except ValueError as error:
        raise ConditionsError(f"{path}: {error}") from None
    if values.get("unmetered") and shutil.which("nmcli") is None:
        raise ConditionsError(
            f"{path}: unmetered needs NetworkManager's nmcli, which is not here: leave it out"
        )
    return Conditions(**values, machine=machine)


def _value(name: str, text: str) -> Any:
    known = [each.name for each in fields(Conditions) if each.name != "machine"]
    if name not in known:
        raise ValueError(f"there is no condition {name!r}; there are {', '.join(known)}")
    if name == "hours":
        return tuple(_span(part.strip()) for part in text.split(","))
    if name in ("mains_power", "unmetered"):
        words = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}
        if text.lower() not in words:
            raise ValueError(f"{name} = {text}: write yes or no")
        return words[text.lower()]
    if name in ("min_free_memory", "min_free_disk"):
        return parse_size(text)
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1000:
        raise ValueError(f"{name} = {text}: give a number above 0")
    return number


def _span(text: str) -> tuple[int, int]:
    found = _SPAN.fullmatch(text)
    numbers = [] if found is None else [int(part) for part in found.groups()]
    if not numbers or numbers[0] > 23 or numbers[2] > 24 or max(numbers[1], numbers[3]) > 59:
        raise ValueError(f"hours = {text}: write 22:00-06:00, and several with commas")
    return numbers[0] * 60 + numbers[1], numbers[2] * 60 + numbers[3]


def _within(minute: int, span: tuple[int, int]) -> bool:
    first, end = span
    return first <= minute < end if first < end else minute >= first or minute < end


def _span_text(span: tuple[int, int]) -> str:
    return "-".join(f"{minute // 60:02}:{minute % 60:02}" for minute in span)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
