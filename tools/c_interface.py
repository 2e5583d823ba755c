"""`python -m tools.c_interface` writes what follows from the C headers.

That is kernels/prototypes.py, their Python side, and kernels/src/train/functions.inc, the functions that a
program (`fedmpq/program.h`) can call.

The headers in kernels/include are the one place where the C interface is written. They keep to a small part
of C: structures of numbers and pointers to numbers, and functions of numbers, pointers to numbers and
pointers to those structures. Anything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_INCLUDE = ROOT / "kernels" / "include" / "fedmpq"
HEADERS = tuple(_INCLUDE / name for name in ("kernels.h", "training.h", "program.h"))
TARGET = ROOT / "kernels" / "prototypes.py"
TRAINING = _INCLUDE / "training.h"
FUNCTIONS = ROOT / "kernels" / "src" / "train" / "functions.inc"

_NUMBERS = {
    "int32_t": "c_int32",
    "int64_t": "c_int64",
    "uint32_t": "c_uint32",
    "float": "c_float",
    "double": "c_double",
}
_ELEMENTS = {
    "int8_t": "int8",
    "uint8_t": "uint8",
    "int16_t": "int16",
    "uint16_t": "uint16",
    "int32_t": "int32",
    "uint32_t": "uint32",
    "int64_t": "int64",
    "float": "float32",
    "double": "float64",
}
_STRUCTURE = re.compile(r"typedef struct \{([^}]*)\} (\w+);")
_FUNCTION = re.compile(r"FEDMPQ_API ([^;(]*?)(\w+)\(([^)]*)\);")
_DECLARED = re.compile(r"(?:const )?(\w+)( ?\*)? ?(\w+)(\[\d+\])?")


@dataclass(frozen=True)
class Field:
    """An argument or a field: its ctypes type, or the structure it points to; and the type of the elements if
    it points to numbers."""

    name: str
    type: str
    element: str | None

    def render(self) -> str:
        element = f', "{self.element}"' if self.element else ""
        return f'Argument("{self.name}", {self.type}{element})'


@dataclass(frozen=True)
class Structure:
    name: str
    fields: tuple[Field, ...]

    def render(self) -> str:
        fields = "".join(f'        ("{field.name}", {field.type}),\n' for field in self.fields)
        elements = ", ".join(f'"{field.name}": "{field.element}"' for field in self.fields if field.element)
        lines = f"    elements = {{{elements}}}\n    _fields_ = [\n{fields}    ]"
        return f"class {self.name}(CStruct):\n{lines}\n"


@dataclass(frozen=True)
class Function:
    name: str
    result: str
    arguments: tuple[Field, ...]

    def render(self) -> str:
        arguments = "".join(f"\n        {argument.render()}," for argument in self.arguments)
        return f'    "{self.name}": Prototype({self.result}, ({arguments})),'


def structures(text: str) -> Iterator[Structure]:
    """The structures that a header declares."""
    for body, name in _STRUCTURE.findall(_plain(text)):
        declarations = [each.strip() for each in body.split(";") if each.strip()]
        yield Structure(name, tuple(field for each in declarations for field in _fields(each)))


def functions(text: str, known: set[str]) -> Iterator[Function]:
    """The functions that a header declares, which may take pointers to the `known` structures."""
    found = _FUNCTION.findall(_plain(text))
    if len(found) != _plain(text).count("FEDMPQ_API "):
        raise ValueError("a function's declaration is more C than this reads; write it more simply")
    for result, name, arguments in found:
        declarations = [] if arguments.strip() == "void" else arguments.split(",")
        fields = tuple(_field(each.strip(), known) for each in declarations)
        yield Function(name, _result(result.strip()), fields)


def render(texts: list[str]) -> str:
    """The module for these headers."""
    declared = [structure for text in texts for structure in structures(text)]
    known = {structure.name for structure in declared}
    prototypes = [function.render() for text in texts for function in functions(text, known)]
    parts = [_HEAD, *(structure.render() for structure in declared)]
    return "\n\n".join(parts) + "\n\nPROTOTYPES = {\n" + "\n".join(prototypes) + "\n}\n"


def render_functions(training: str) -> str:
    """The functions of training.h that return a status, as program.cpp lists them."""
    known = {structure.name for structure in structures(training)}
    named = [each.name for each in functions(training, known) if each.result == "c_int32"]
    return _FUNCTIONS_HEAD + "".join(f"FEDMPQ_FUNCTION({name})\n" for name in named)


def _plain(text: str) -> str:
    """Without comments and directives, and every run of blanks as one."""
    return " ".join(re.sub(r"(?m)//.*$|^#.*$", "", text).split())


def _fields(declaration: str) -> Iterator[Field]:
    """`const float *step, *rate` is two fields of one type."""
    base, first = re.match(r"((?:const )?\w+)\s*(.*)", declaration).groups()  # type: ignore[union-attr]
    for each in first.split(","):
        yield _field(f"{base} {each.strip()}", set())


def _field(declaration: str, known: set[str]) -> Field:
    found = _DECLARED.fullmatch(re.sub(r"\s*\*\s*", "* ", declaration))
    if found is None:
        raise ValueError(f"the declaration {declaration!r} is more C than this reads; write it more simply")
    base, star, name, extent = found.groups()
    if not star and not extent and base in _NUMBERS:
        return Field(name, _NUMBERS[base], None)
    if (star or extent) and base in _ELEMENTS:
        return Field(name, "c_void_p", _ELEMENTS[base])
    if star and base == "void":
        return Field(name, "c_void_p", None)
    if star and base == "char":
        return Field(name, "c_char_p", None)
    if star and base in known:
        return Field(name, base, None)
    raise ValueError(
        f"{declaration!r}: {base!r} is no type that the Python side knows; add it to this module"
    )


def _result(result: str) -> str:
    known = {"void": "None", "const char*": "c_char_p", **_NUMBERS}
    if result not in known:
        raise ValueError(f"a function returns {result!r}, which the Python side does not know; add it here")
    return known[result]


_HEAD = '''\
"""The C interface as ctypes sees it; `python -m tools.c_interface` writes this file from include/fedmpq."""

from __future__ import annotations

from ctypes import c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_void_p
from typing import Any, NamedTuple

from fedmpq.kernels.memory import CStruct


class Argument(NamedTuple):
    name: str
    type: Any
    """Its ctypes type; of a pointer to a structure, the structure."""
    element: str | None = None
    """The type of the elements, if it points to numbers."""


class Prototype(NamedTuple):
    result: Any
    arguments: tuple[Argument, ...]
'''


_FUNCTIONS_HEAD = """\
// What a program can call; `python -m tools.c_interface` writes this file from include/fedmpq/training.h.
"""


def main() -> None:
    TARGET.write_text(render([header.read_text() for header in HEADERS]))
    FUNCTIONS.write_text(render_functions(TRAINING.read_text()))


if __name__ == "__main__":
    main()
