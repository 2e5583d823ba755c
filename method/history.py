"""What a run did, round by round: one format for simulations and servers, and its table.

`RoundFacts` is what is known of one merged round, `ClientFacts` what became of one client's place in it.
`to_dict` gives a line of `fedmpq history --format jsonl`; `History` is the table of many rounds, one flat row
each.
"""

from __future__ import annotations

import csv
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TextIO, overload

Row = dict[str, Any]
Outcome = Literal["trained", "late", "rejected", "declined"]
"""What became of a client's place: its update counts; it came too late or not at all; its update was refused;
the client said that it could not take part."""
TEST_DATA, BOARDS = "test data", "boards"
"""On what accuracies are measured: images that the server or simulation has, or each board on its own."""
PHASES = ("training", "merging", "calibrating", "measuring")
"""Where a round's seconds go: until the last update is there; making the next model of them; until it has
statistics; measuring its accuracy."""


@dataclass(frozen=True)
class ClientFacts:
    """One client in one round."""

    client: int
    name: str
    outcome: Outcome
    reason: str = ""
    """Why it is not "trained"."""
    bit_widths: tuple[int, ...] = ()
    """What it was dealt, layer by layer; empty in full precision."""
    bytes_up: int = 0
    bytes_down: int = 0
    staleness: int = 0
    """Merges between the model that it was sent and the one that its change was merged into."""


@dataclass(frozen=True)
class RoundFacts:
    """One round that was merged."""

    round: int
    loss: float
    accuracy: float | None
    """Of the full-precision model, where it was measured, by `metric`."""
    deployed: Mapping[str, float]
    """By budget, the mean of the integer models that devices run, by `metric`; empty if nobody measured."""
    mean_deployed: float | None
    measured_by: str
    """TEST_DATA, BOARDS, or nobody: empty."""
    bytes_up: int
    bytes_down: int
    bit_widths: tuple[int, ...]
    """The average over clients, from which the next deal starts."""
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase (PHASES); empty for a round of a version that did not measure them."""
    clients: tuple[ClientFacts, ...] = ()
    undone: str = ""
    """Why the model of this round was thrown away; empty: it counts."""
    metric: str = "accuracy"
    """By which models are measured, see `model.metrics`; it names columns."""
    others: Mapping[str, float] = field(default_factory=dict)
    """Other metrics of what devices run, by name: means over the clients."""
    virtual_time: float | None = None
    """Seconds since the run began by a simulation's virtual clock; None: it has none."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; the metric goes by its name."""
        return {self.metric if name == "accuracy" else name: value for name, value in asdict(self).items()}

    def row(self) -> Row:
        """Flat, for a table; what was not measured is None."""
        outcomes = [one.outcome for one in self.clients]
        return {
            "round": self.round,
            "loss": self.loss,
            self.metric: self.accuracy,
            **{f"{self.metric}_{budget}_bit": value for budget, value in self.deployed.items()},
            "mean_deployed": self.mean_deployed,
            **self.others,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "clients": outcomes.count("trained"),
            **self._staleness(),
            "late": outcomes.count("late"),
            "rejected": outcomes.count("rejected"),
            "declined": outcomes.count("declined"),
            "bit_widths": self.bit_widths,
            "seconds": self.seconds,
            **{f"seconds_{phase}": self.phases.get(phase) for phase in PHASES},
            **({} if self.virtual_time is None else {"virtual_time": self.virtual_time}),
        }

    def _staleness(self) -> dict[str, float]:
        """The mean of what was merged, where merges are asynchronous and some of it was of earlier ones."""
        ages = [one.staleness for one in self.clients if one.outcome == "trained"]
        return {"staleness": sum(ages) / len(ages)} if any(ages) else {}


class History(Sequence[Row]):
    """One row a round. `history[-1]` is the last row, `history["loss"]` a column; `pandas.DataFrame(history)`
    and `csv.DictWriter` take it as it is. What was not measured in a round is None there. `history.rounds`
    has the same as `RoundFacts`, with every client's part."""

    def __init__(self, rounds: Iterable[RoundFacts]) -> None:
        self.rounds = tuple(rounds)
        self._rows = [facts.row() for facts in self.rounds]
        self.columns = _columns(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> History: ...
    @overload
    def __getitem__(self, index: str) -> list[Any]: ...
    def __getitem__(self, index: int | slice | str) -> Row | History | list[Any]:
        if isinstance(index, str):
            if index not in self.columns:
                raise KeyError(f"there is no column {index!r}; there are {', '.join(self.columns)}")
            return [row.get(index) for row in self._rows]
        return History(self.rounds[index]) if isinstance(index, slice) else self._rows[index]

    def write_csv(self, file: TextIO) -> None:
        """One line a round under a line of names; what was not measured is left empty."""
        writer = csv.DictWriter(file, self.columns)
        writer.writeheader()
        for row in self._rows:
            widths = " ".join(map(str, row["bit_widths"]))
            writer.writerow({name: row.get(name) for name in self.columns} | {"bit_widths": widths})

    def write_json_lines(self, file: TextIO) -> None:
        """One object a round, with every client's part."""
        file.writelines(json.dumps(facts.to_dict()) + "\n" for facts in self.rounds)

    def __str__(self) -> str:
        cells = [self.columns, *(tuple(_text(row.get(name)) for name in self.columns) for row in self._rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(self.columns))]
        return "\n".join(
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(_text(row.get(name)))}</td>' for name in self.columns)}</tr>"
            for row in self._rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _columns(rows: Sequence[Row]) -> tuple[str, ...]:
    """Those of all rows; budgets that appear later stand beside the others."""
    if not rows:
        return ()
    names = dict.fromkeys(name for row in rows for name in row)
    budgets = sorted((name for name in names if name.endswith("_bit")), key=_bits)
    plain = [name for name in names if not name.endswith("_bit")]
    place = plain.index("mean_deployed")
    return (*plain[:place], *budgets, *plain[place:])


def _bits(name: str) -> float:
    return float(name.removesuffix("_bit").rpartition("_")[2])


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
