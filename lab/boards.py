"""The virtual clock: how long a board of a simulation would take, by a model of its speed and its network.

A board that is sent `D` bytes in round `t`, trains `n` samples (every epoch counts) and gives back `U` bytes
takes

    latency + slow D / down + slow n seconds_per_sample (1 + jitter u_t) + latency + slow U / up

with `u_t` uniform in [0, 1), drawn from (seed, client, round), and `slow = 1 + (spread - 1) u`, `u` drawn
from (seed, client): of many boards the slowest takes nearly `spread` times as long as the fastest. Times are
whole microseconds, each part rounded by itself: sums are exact, and one seed gives the same times everywhere.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from fedmpq.model.randomness import Draws, Purpose

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MICROSECONDS = 1_000_000
_MOST = 1e9
"""No number of a board is larger, and no rate smaller than its inverse: times stay exact."""


class BoardsError(ValueError):
    """A model of boards that cannot be read or is out of range."""


@dataclass(frozen=True)
class Board:
    """How fast one board computes and communicates."""

    seconds_per_sample: float = 0.01
    """Of training, forward and backward, a sample of one epoch."""
    down: float = 1e6
    """Bytes a second from the server."""
    up: float = 1e6
    """Bytes a second to the server."""
    latency: float = 0.05
    """Seconds before each of the two transfers begins."""
    jitter: float = 0.0
    """Computing takes up to so much longer, as a share, anew in every round."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 1 / _MOST if each.name in ("down", "up") else 0.0
            # Written so that NaN fails it too.
            if type(value) not in (int, float) or not least <= value <= _MOST:
                raise BoardsError(f"{each.name} = {value!r} is no number of {least:g}..{_MOST:g}")


@dataclass(frozen=True)
class Boards:
    """The boards of a fleet: one for all, and others for some clients."""

    usual: Board = field(default_factory=Board)
    spread: float = 1.0
    """How many times as long the slowest may take, computing and sending."""
    own: Mapping[int, Board] = field(default_factory=dict)
    """By client, in place of the usual one; `spread` leaves these as they are."""

    def __post_init__(self) -> None:
        if type(self.spread) not in (int, float) or not 1 <= self.spread <= _MOST:
            raise BoardsError(f"spread = {self.spread!r} is no number of 1..{_MOST:g}")

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Boards:
        """From the tables of a TOML file: numbers of the usual board, `spread`, and `[[board]]`, each with
        `clients` and what differs for them."""
        rest = dict(settings)
        spread, tables = rest.pop("spread", 1.0), rest.pop("board", [])
        usual = _changed(Board(), rest, "boards")
        if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
            raise BoardsError("board is no list of tables; write [[board]] before those of some clients")
        own: dict[int, Board] = {}
        for table in tables:
            some = dict(table)
            board = None
            for client in _clients(some.pop("clients", None)):
                if client in own:
                    raise BoardsError(f"client {client} is in two of the [[board]] tables")
                own[client] = board = board or _changed(usual, some, "[[board]]")
        return cls(usual, spread, own)

    @classmethod
    def from_text(cls, text: str) -> Boards:
        """What `text` gave."""
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, AttributeError) as error:
            if isinstance(error, BoardsError):
                raise
            raise BoardsError(f"{text[:80]!r} is no model of boards") from None

    def text(self) -> str:
        """All of it on one line of JSON; equal boards have equal text."""
        tables = [{"clients": [client], **asdict(board)} for client, board in sorted(self.own.items())]
        return json.dumps({**asdict(self.usual), "spread": self.spread, "board": tables})

    def of(self, client: int, seed: int) -> Board:
        """The client's board, with its times as they are."""
        if client in self.own:
            return self.own[client]
        if self.spread == 1:
            return self.usual
        slow = 1 + (self.spread - 1) * float(Draws(seed, client, 0).uniform(1, Purpose.SPEED)[0])
        usual = self.usual
        return replace(
            usual,
            seconds_per_sample=usual.seconds_per_sample * slow,
            down=usual.down / slow,
            up=usual.up / slow,
        )


@dataclass(frozen=True)
class VirtualClock:
    """Times of the boards of one simulation, in whole microseconds."""

    boards: Boards
    seed: int

    def trained(self, client: int, round_number: int, samples: int, down: int) -> int:
        """From the call for work until the board has trained: `down` bytes fetched, `samples` computed."""
        board = self.boards.of(client, self.seed)
        slower = 1.0
        if board.jitter:
            drawn = Draws(self.seed, client, round_number).uniform(1, Purpose.SPEED, step=1)
            slower += board.jitter * float(drawn[0])
        return (
            _micros(board.latency)
            + _micros(down / board.down)
            + _micros(samples * board.seconds_per_sample * slower)
        )

    def sent(self, client: int, up: int) -> int:
        """From then until the server has its `up` bytes."""
        board = self.boards.of(client, self.seed)
        return _micros(board.latency) + _micros(up / board.up)


def seconds(micros: int) -> float:
    return micros / MICROSECONDS


def micros(virtual_seconds: float) -> int:
    """The whole number of which `seconds` made this; up to 71 years that is exact."""
    return _micros(virtual_seconds)


def boards_text(value: object) -> str:
    """Boards as a setting holds them: given as tables, as a `Boards`, as such text, or as a TOML file."""
    if isinstance(value, Boards):
        return value.text()
    if isinstance(value, Mapping):
        return Boards.from_dict(value).text()
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return Boards.from_text(value).text()
    if not isinstance(value, str | Path):
        raise BoardsError(f"boards = {value!r} is no TOML file and no table of numbers")
    return _read(Path(value).expanduser()).text()


def _read(path: Path) -> Boards:
    try:
        return Boards.from_dict(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as problem:
        raise BoardsError(f"cannot read {path}: {problem.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise BoardsError(f"{path} is not valid TOML: {problem}") from None
    except BoardsError as problem:
        raise BoardsError(f"{path}: {problem}") from None


def _changed(board: Board, given: Mapping[str, Any], where: str) -> Board:
    known = [each.name for each in fields(Board)]
    for name in given:
        if name not in known:
            raise BoardsError(f"{where} has {name!r}; known are {', '.join(known)}")
    return replace(board, **given)


def _clients(value: object) -> list[int]:
    """`[0, 1, 2]`, or "0-2" for the same."""
    if isinstance(value, str):
        first, dash, last = value.partition("-")
        if first.strip().isdecimal() and (not dash or last.strip().isdecimal()):
            return list(range(int(first), int(last if dash else first) + 1))
    try:
        found = msgspec.convert(value, list[int])
    except msgspec.ValidationError:
        found = []
    if not found or min(found) < 0:
        raise BoardsError(
            f"[[board]] has clients = {value!r}; give numbers such as [0, 1] or a range such as '0-4'"
        )
    return found


def _micros(duration: float) -> int:
    return round(duration * MICROSECONDS)
