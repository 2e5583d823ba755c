"""The change of one weight by its formula, in plain Python numbers."""

from __future__ import annotations

CELL = 4096


def slow_change(code: int, step: int, place: int, bits: int, within: bool) -> int:
    low, high = (1, 255) if bits == 8 else (0, 2**bits - 1)
    moved = step * (2 * code - (256 if bits == 8 else 2**bits - 1))
    if not within:
        return moved - place

    def cell(where: int) -> int:
        return min(max((where + CELL // 2) // CELL, low), high)

    ended = cell(CELL * cell(place) + moved)
    end = place + moved
    if ended > low:
        end = max(end, CELL * ended - CELL // 2)
    if ended < high:
        end = min(end, CELL * ended + CELL // 2)
    return end - place
