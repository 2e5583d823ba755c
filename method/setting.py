"""One setting: a field whose type, default and words serve options, TOML files and documentation alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

WHAT, FLEET, LOCAL, EXPERT = "what to train", "the fleet", "local training", "overriding the profile"
"""The groups in which `fedmpq simulate --help` lists settings."""


def setting(
    default: Any,
    group: str,
    help: str,
    *,
    metavar: str | None = None,
    choices: tuple[Any, ...] | None = None,
) -> Any:
    """A field that is also an option of `fedmpq simulate` and a key of its TOML file, all from here."""
    return field(
        default=default, metadata={"group": group, "help": help, "metavar": metavar, "choices": choices}
    )


@dataclass(frozen=True)
class FieldType:
    """What a setting holds. One of several words is checked where they are known, with a suggestion."""

    plain: Any
    """int, float, bool, str or a tuple of one of them."""
    optional: bool
    words: tuple[str, ...] = ()


def field_types(kind: type[Any]) -> dict[str, FieldType]:
    """The type of each field, by name."""
    hints = get_type_hints(kind)
    return {each.name: _field_type(hints[each.name]) for each in fields(kind)}


def _field_type(hint: Any) -> FieldType:
    options = [one for one in get_args(hint) if one is not type(None)] if _is_union(hint) else [hint]
    (plain,) = options
    if get_origin(plain) is Literal:
        return FieldType(str, _is_union(hint), get_args(plain))
    return FieldType(plain, _is_union(hint))


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, UnionType)


_WANTED: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a word in quotes",
    tuple[int, ...]: "a list of whole numbers",
    tuple[float, ...]: "a list of numbers",
    tuple[str, ...]: "a list of words in quotes",
}


def typed(error: type[ValueError], name: str, wanted: FieldType, value: Any) -> Any:
    """The value as annotated; TOML writes 1 where 1.0 is meant, and nothing else is converted."""
    if value is None and wanted.optional:
        return None
    if wanted.plain is float and value == "inf":
        return math.inf
    try:
        return msgspec.convert(value, wanted.plain)
    except msgspec.ValidationError as problem:
        if "out of range" in str(problem):
            raise error(f"{name} holds a number too large for any use") from None
        raise error(f"{name} = {value!r} is not {_WANTED[wanted.plain]}") from None
