"""Objects of the user's own by name, `package.module:Class`, through the protocol the built-in ones use.

Modules are looked for where Python looks for them, and in the current directory.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar, cast

T = TypeVar("T")

SEPARATOR = ":"
_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_PATH = re.compile(f"{_DOTTED}{SEPARATOR}{_DOTTED}")


class NamedObjectError(ValueError):
    """A name that leads to nothing, or to something that does not fit."""


def is_path(spec: str) -> bool:
    """Whether `spec` has the form of `package.module:Class`, and so is no name of something built in."""
    return _PATH.fullmatch(spec) is not None


def load_object(spec: str, protocol: Callable[..., T], what: str, *arguments: object) -> T:
    """What `package.module:Class` names, as an object that has every member of `protocol`.

    `what` says in errors what the object was to be, such as "export target".
    """
    return require_members(make_object(spec, what, *arguments), protocol, f"{what} {spec!r}")


def make_object(spec: str, what: str, *arguments: object) -> object:
    """What `package.module:Class` names: a class or a function is called with `arguments`, anything else is
    taken as it is."""
    found = load_attribute(spec, what)
    if inspect.isclass(found) or inspect.isroutine(found):
        try:
            found = found(*arguments)
        # Whatever the user's code raises: the cause is chained, the message says whose code it was.
        except Exception as error:
            raise NamedObjectError(f"{what} {spec!r} cannot be made: {_one_line(error)}") from error
    return found


def load_attribute(spec: str, what: str) -> object:
    """The attribute `Class` of the module `package.module`, as it is there."""
    if not is_path(spec):
        raise NamedObjectError(f"{what} {spec!r} names no object; write it as package.module:name")
    path, _, attribute = spec.partition(SEPARATOR)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: object = importlib.import_module(path)
        for part in attribute.split("."):
            found = getattr(found, part)
    # A module may fail in any way when it is imported.
    except Exception as error:
        raise NamedObjectError(f"{what} {spec!r} cannot be imported: {_one_line(error)}") from error
    return found


def require_members(found: object, protocol: Callable[..., T], what: str) -> T:
    """`found` itself, if it has every member of `protocol`; its methods must be callable."""
    for member, is_method in _members(cast("type", protocol)).items():
        missing = not hasattr(found, member)
        if missing or (is_method and not callable(getattr(found, member))):
            kind = "method" if is_method else "attribute"
            fault = "is missing" if missing else "cannot be called"
            raise NamedObjectError(
                f"{what} is a {type(found).__name__} that does not fit: its {kind} {member!r} {fault}; "
                f"see {protocol.__module__}.{protocol.__qualname__}"
            )
    return cast(T, found)


def unknown_name(what: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is none of the known ones: what there is, and which was likely meant."""
    names = list(known)
    return (
        f"no {what} is called {name!r}{suggestion(name, names)}; "
        f"take {', '.join(names)}, or your own as package.module:Class"
    )


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'onnx'?)` for the nearest of the known words, or nothing where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _members(protocol: type) -> dict[str, bool]:
    """The public members of a protocol in the order of their definition, and whether each is a method.

    A property counts as an attribute.
    """
    members: dict[str, bool] = {}
    for base in reversed(protocol.__mro__):
        if getattr(base, "_is_protocol", False):
            declared = {**dict.fromkeys(inspect.get_annotations(base)), **vars(base)}
            public = {name: value for name, value in declared.items() if not name.startswith("_")}
            members |= {name: inspect.isroutine(value) for name, value in public.items()}
    return members


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"
