"""How the facts of a status are written for people: names, bytes, bit-widths, times."""

from __future__ import annotations

MOST_WIDTHS = 32
"""Layers whose bit-widths are shown one by one."""
MOST_TEXT = 200
UNBOUNDED_WIDTH = 10_000
NONE = "–"
_UNITS = ("B", "kB", "MB", "GB", "TB")


def plain(text: str) -> str:
    """What a client says of itself may hold anything, and must not steer the operator's terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:MOST_TEXT])


def widths_text(widths: bytes) -> str:
    """A digit for each layer, as bit-widths are 1..8; many layers as how many have each width."""
    if not widths:
        return NONE
    if len(widths) <= MOST_WIDTHS:
        return "".join(str(width) for width in widths)
    return " ".join(f"{widths.count(width)}x{width}" for width in sorted(set(widths)))


def bytes_text(count: int) -> str:
    """Three digits and a decimal unit."""
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if unit == 0 or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {_UNITS[unit]}"


def seconds_text(seconds: float) -> str:
    """Two or three digits and a unit."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def short_name(name: str, most: int) -> str:
    """A name of at most so many letters; of a longer one both ends, for there names of a fleet differ."""
    text = plain(name)
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[-tail:]}"
