"""The rounds of a run as a table: accuracy by budget, bytes and bit-widths."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from fedmpq.lab.round_log import RoundResult

Row = dict[str, Any]


class History(Sequence[Row]):
    """One row a round. `history[-1]` is the last row, `history["loss"]` a column; `pandas.DataFrame(history)`
    and `csv.DictWriter` take it as it is. What was not measured in a round is None there."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)
        self.columns = tuple(dict.fromkeys(name for row in self._rows for name in row))

    @classmethod
    def of_results(cls, results: Iterable[RoundResult]) -> History:
        """The rounds of a simulation."""
        return cls(_row(result) for result in results)

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
        return History(self._rows[index]) if isinstance(index, slice) else self._rows[index]

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


def _row(result: RoundResult) -> Row:
    shares = result.accuracies
    return {
        "round": result.round,
        "loss": result.loss,
        "accuracy": None if shares is None else shares.accuracy,
        **({} if shares is None else {f"accuracy_{b}_bit": share for b, share in shares.deployed.items()}),
        "mean_deployed": None if shares is None else shares.mean_deployed,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "clients": len(result.clients),
        "bit_widths": result.bit_widths,
        "seconds": result.seconds,
    }


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)
