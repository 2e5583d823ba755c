"""The Python side of the C interface: generated from the headers, and what the compiler reads in them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fedmpq.kernels import bound, prototypes
from fedmpq.kernels.call import Call, Elements
from fedmpq.kernels.memory import Buffer, CStruct
from fedmpq.kernels.prototypes import FedmpqCodes, FedmpqRescale
from tools import c_interface

TEXTS = [header.read_text() for header in c_interface.HEADERS]
STRUCTURES = [each for text in TEXTS for each in c_interface.structures(text)]
C_NUMBERS = {
    ctypes.c_int32: "int32_t",
    ctypes.c_int64: "int64_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_float: "float",
    ctypes.c_double: "double",
}
C_ELEMENTS = {"float32": "float", "float64": "double"}


def element(name: str) -> str:
    return C_ELEMENTS.get(name, f"{name}_t")


def c_type(argument: prototypes.Argument) -> str:
    """What the headers must declare for an argument, `const` left out."""
    if argument.element is not None:
        return f"{element(argument.element)}*"
    if argument.type is ctypes.c_char_p:
        return "char*"
    return C_NUMBERS.get(argument.type) or f"{argument.type.__name__}*"


def result_type(result: object) -> str:
    if result is None:
        return "void"
    return "char*" if result is ctypes.c_char_p else C_NUMBERS[result]  # type: ignore[index]


def structure_checks(structure: type[CStruct]) -> list[str]:
    name = structure.__name__
    checks = [f"static_assert(sizeof({name}) == {ctypes.sizeof(structure)});"]
    for field, kind in structure._fields_:  # type: ignore[misc]
        offset = getattr(structure, field).offset
        checks.append(f"static_assert(offsetof({name}, {field}) == {offset});")
        declared = C_NUMBERS.get(kind) or f"{element(structure.elements.get(field, 'void'))}*"
        declared = declared.replace("void_t", "void")
        checks.append(f"static_assert(std::is_same_v<plain<decltype({name}::{field})>, {declared}>);")
    return checks


def function_check(name: str, prototype: prototypes.Prototype) -> str:
    arguments = ", ".join(["tag", *(c_type(argument) for argument in prototype.arguments)])
    declared = f"signature<{result_type(prototype.result)}, {arguments}>"
    return f"static_assert(std::is_same_v<decltype(of(&{name})), {declared}>);"


CHECKS = """
#include <cstddef>
#include <type_traits>
#include "fedmpq/program.h"
template <class T> struct plain_of { using type = T; };
template <class T> struct plain_of<const T*> { using type = T*; };
template <class T> using plain = typename plain_of<T>::type;
struct tag {};
template <class...> struct signature {};
template <class R, class... A> signature<plain<R>, tag, plain<A>...> of(R (*)(A...));
"""


def compile_checks(checks: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    compiler = os.environ.get("CXX") or shutil.which("c++") or "g++"
    source = folder / "checks.cpp"
    source.write_text(CHECKS + "\n".join(checks))
    include = f"-I{c_interface.ROOT / 'kernels' / 'include'}"
    command = [compiler, "-std=c++17", "-fsyntax-only", include, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_prototypes_are_those_of_the_headers() -> None:
    assert c_interface.TARGET.read_text() == c_interface.render(TEXTS), (
        "kernels/prototypes.py is older than the headers: run `python -m tools.c_interface`"
    )


def test_a_program_can_call_the_functions_that_return_a_status() -> None:
    listed = c_interface.render_functions(c_interface.TRAINING.read_text())
    assert c_interface.FUNCTIONS.read_text() == listed, (
        "kernels/src/train/functions.inc is older than training.h: run `python -m tools.c_interface`"
    )
    assert "FEDMPQ_FUNCTION(fedmpq_conv_forward)" in listed
    assert "force_bit_serial" not in listed
    assert "fedmpq_run" not in listed


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("int32_t threads, int32_t* acc, double* sums", "int32_t threads, int32_t* acc, float* sums"),
        ("float multiplier, float low", "double multiplier, float low"),
        ("const FedmpqExtent* extent, const FedmpqRescale* rescale,\n", "const FedmpqExtent* extent,\n"),
        ("const float *scale, *shift;", "const double *scale, *shift;"),
        ("int32_t pairs, zero;", "int64_t pairs, zero;"),
        ("FEDMPQ_API void fedmpq_force_bit_serial", "FEDMPQ_API double fedmpq_force_bit_serial"),
    ],
)
def test_a_type_changed_in_a_header_changes_the_prototypes(before: str, after: str) -> None:
    assert any(before in text for text in TEXTS)
    changed = [text.replace(before, after) for text in TEXTS]
    assert c_interface.render(changed) != c_interface.TARGET.read_text()


def test_the_compiler_reads_the_headers_as_python_does(tmp_path: Path) -> None:
    """Sizes, offsets and types of all structures, and all functions' types, by static assertions."""
    structures = [getattr(prototypes, structure.name) for structure in STRUCTURES]
    checks = [check for structure in structures for check in structure_checks(structure)]
    checks += [function_check(*item) for item in prototypes.PROTOTYPES.items()]
    done = compile_checks(checks, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["fedmpq_add_errors", "fedmpq_requantize", "fedmpq_halve_errors"])
def test_the_compiler_refuses_a_prototype_of_other_types(tmp_path: Path, name: str) -> None:
    result, (first, *others) = prototypes.PROTOTYPES[name]
    wrong = prototypes.Prototype(result, (first._replace(element="float64"), *others))
    done = compile_checks([function_check(name, wrong)], tmp_path)
    assert done.returncode != 0
    assert "static assertion failed" in done.stderr or "static_assert failed" in done.stderr


@pytest.mark.parametrize(
    ("declaration", "complaint"),
    [
        ("FEDMPQ_API int fedmpq_f(void);", "returns 'int'"),
        ("FEDMPQ_API void fedmpq_f(const FedmpqNone* x);", "FedmpqNone"),
        ("FEDMPQ_API void fedmpq_f(float** x);", "more C than this reads"),
        ("FEDMPQ_API void fedmpq_f(void (*callback)(void));", "more C than this reads"),
    ],
)
def test_what_python_could_not_call_is_refused(declaration: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        c_interface.render([declaration])


def test_memory_of_another_type_than_declared_is_refused() -> None:
    halves, floats = np.zeros(4, np.uint16), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="4 float32 where 4 contiguous uint16 are due"):
        bound.add_errors(floats, 4, halves)
    with pytest.raises(ValueError, match="4 uint16 where 4 contiguous float32 are due"):
        FedmpqRescale().point("scale", halves, 4)


def test_an_argument_of_another_kind_than_declared_is_refused() -> None:
    halves = np.zeros(4, np.uint16)
    with pytest.raises(TypeError, match="'other' is declared as uint16"):
        Call("fedmpq_add_errors", halves.ctypes.data, 4, Elements(halves, 4))
    with pytest.raises(TypeError, match="'count' is declared as c_long"):
        Call("fedmpq_add_errors", Elements(halves, 4), Elements(halves, 4), Elements(halves, 4))
    with pytest.raises(ValueError, match="shorter"):
        Call("fedmpq_add_errors", Elements(halves, 4), 4)
    codes = FedmpqCodes()
    with pytest.raises(TypeError, match="'pool' is declared as FedmpqPool"):
        Call("fedmpq_max_pool", codes, codes, 1, Elements(np.zeros(4, np.uint8), 4))
    with pytest.raises(TypeError, match="'pool' is declared as FedmpqPool"):
        Call("fedmpq_max_pool", 1, codes, 1, Elements(np.zeros(4, np.uint8), 4))
    with pytest.raises(TypeError, match="float"):
        Call("fedmpq_add_errors", Elements(halves, 4), 4.0, Elements(halves, 4))
    with pytest.raises(TypeError):
        Call("fedmpq_add_errors", Elements(halves, 4), ctypes.c_float(4), Elements(halves, 4))


def test_a_structure_follows_the_buffers_it_points_to() -> None:
    buffer, codes = Buffer(4, np.uint8), FedmpqCodes()
    codes.point("data", buffer, 4)
    assert codes.data is None
    for array in (np.zeros(4, np.uint8), np.ones(4, np.uint8)):
        buffer.put(array)
        assert codes.data == array.ctypes.data
    buffer.drop()
    assert codes.data is None
