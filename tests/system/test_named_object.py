"""Objects of the user's by `package.module:Class`: what fits is made, what does not is named."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Protocol

import pytest

from fedmpq.system.named_object import (
    NamedObjectError,
    is_path,
    load_attribute,
    load_object,
    require_members,
    suggestion,
    unknown_name,
)


class Named(Protocol):
    name: str


class Greeter(Named, Protocol):
    @property
    def language(self) -> str: ...
    def greet(self, whom: str) -> str: ...


SOURCE = """
class Friendly:
    name = "friendly"
    language = "en"
    def __init__(self, mark="!"):
        self.mark = mark
    def greet(self, whom):
        return f"hello {whom}{self.mark}"

def make(mark="?"):
    return Friendly(mark)

READY = Friendly(".")

class Holder:
    Inner = Friendly

class Mute:
    name = "mute"
    language = "en"

class Wrong(Mute):
    greet = "hello"

class Nameless(Friendly):
    name = property()

class Broken(Friendly):
    def __init__(self):
        raise OSError("no voice\\nat all")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module in the current directory, which is not on the path before."""
    name = f"greeters_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("Friendly", "hello you!"),
        ("make", "hello you?"),
        ("READY", "hello you."),
        ("Holder.Inner", "hello you!"),
    ],
)
def test_classes_functions_and_objects_are_found(module: str, attribute: str, said: str) -> None:
    assert load_object(f"{module}:{attribute}", Greeter, "greeter").greet("you") == said


def test_arguments_are_handed_over(module: str) -> None:
    assert load_object(f"{module}:Friendly", Greeter, "greeter", " :)").greet("you") == "hello you :)"


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        (
            "Mute",
            r"greeter '.*:Mute' is a Mute that does not fit: its method 'greet' is missing; see .*Greeter",
        ),
        ("Wrong", r"its method 'greet' cannot be called"),
        ("Nameless", r"its attribute 'name' is missing"),
        ("Broken", r"greeter '.*:Broken' cannot be made: OSError: no voice$"),
        ("Absent", r"greeter '.*:Absent' cannot be imported: AttributeError: .*Absent"),
        ("", r"names no object; write it as package.module:name"),
    ],
)
def test_what_does_not_fit_is_named(module: str, attribute: str, message: str) -> None:
    with pytest.raises(NamedObjectError, match=message):
        load_object(f"{module}:{attribute}", Greeter, "greeter")


def test_a_module_that_is_not_there_is_named(module: str) -> None:
    with pytest.raises(NamedObjectError, match=r"greeter 'no.such:Thing' cannot be imported: ModuleNotFound"):
        load_attribute("no.such:Thing", "greeter")
    assert load_attribute(f"{module}:Mute", "greeter").__name__ == "Mute"  # type: ignore[attr-defined]


def test_an_object_is_given_back_itself(module: str) -> None:
    ready = load_attribute(f"{module}:READY", "greeter")
    assert require_members(ready, Greeter, "the greeter") is ready


def test_an_unknown_name_lists_what_there_is_and_suggests_the_nearest() -> None:
    assert unknown_name("greeter", "frendly", ("friendly", "mute")) == (
        "no greeter is called 'frendly' (did you mean 'friendly'?); "
        "take friendly, mute, or your own as package.module:Class"
    )
    assert suggestion("xyz", ("friendly", "mute")) == ""


@pytest.mark.parametrize(
    ("spec", "is_one"),
    [
        ("package.module:Class", True),
        ("module:Holder.Inner", True),
        ("friendly", False),
        ("module:", False),
        (":Class", False),
        ("..:Class", False),
        ("a/b:Class", False),
        ("C:/folder", False),
    ],
)
def test_paths_are_told_from_names(spec: str, is_one: bool) -> None:
    assert is_path(spec) == is_one
