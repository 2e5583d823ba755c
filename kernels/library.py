"""Finds, loads and types `libfedmpq_kernels.so`, and says which instruction set its dispatch uses.

There is no fallback in Python: a library that cannot be loaded is an ImportError that says how to build it.
The environment variable FEDMPQ_ISA forces an instruction set (one of `ISAS`) at import, and FEDMPQ_KERNELS
names another build of the library, such as one with sanitizers.
"""

from __future__ import annotations

import os
from ctypes import CDLL, c_void_p
from pathlib import Path

from fedmpq.kernels.memory import CStruct
from fedmpq.kernels.prototypes import PROTOTYPES

ISAS = ("avx512", "avx512_vnni", "avx_vnni", "avx2", "sve", "neon_i8mm", "neon_dot", "neon", "scalar")
PATH = Path(os.environ.get("FEDMPQ_KERNELS", Path(__file__).parent / "libfedmpq_kernels.so"))
HOW_TO_BUILD = "build it with `pip install -e .` in the checkout (needs a C++17 compiler)"


def load(path: Path) -> CDLL:
    """The library at `path` with every function's argument and result types set."""
    try:
        loaded = CDLL(str(path))
    except OSError as error:
        raise ImportError(f"fedmpq.kernels: cannot load {path.name} ({error}); {HOW_TO_BUILD}") from error
    for name, prototype in PROTOTYPES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError as error:
            raise ImportError(
                f"fedmpq.kernels: {path.name} lacks {name}, so it is older than its sources; {HOW_TO_BUILD}"
            ) from error
        function.restype = prototype.result
        # Structures are compared when a call is bound, once, and not by ctypes, every time.
        types = [argument.type for argument in prototype.arguments]
        function.argtypes = [c_void_p if issubclass(each, CStruct) else each for each in types]
    return loaded


library = load(PATH)


def isa() -> str:
    """The instruction set dispatch uses: one of `ISAS`."""
    name: bytes = library.fedmpq_isa()
    return name.decode()


def force_isa(name: str) -> None:
    """Makes dispatch use instruction set `name` in the whole process; for tests and measurements."""
    if library.fedmpq_force_isa(name.encode()) != 0:
        raise ValueError(f"instruction set {name!r} is not available here; choose one of {supported_isas()}")


def force_bit_serial(most_bits: int) -> None:
    """Makes convolutions of 4-bit codes use the bit-serial form for weights of up to `most_bits` in the whole
    process; -1: where it is faster. For tests and measurements."""
    library.fedmpq_force_bit_serial(most_bits)


def force_winograd(how: int) -> None:
    """Multiply by Winograd's form wherever it is exact, nowhere if 0; if negative, where it is faster, which
    is the default."""
    library.fedmpq_force_winograd(how)


def supported_isas() -> tuple[str, ...]:
    """The instruction sets this CPU and this build have, best first; "scalar" is always among them.

    Only `sve` is no better than the next one where its registers have 128 bits: it is not chosen there.
    """
    before = isa()
    supported = tuple(name for name in ISAS if library.fedmpq_force_isa(name.encode()) == 0)
    force_isa(before)
    return supported


if "FEDMPQ_ISA" in os.environ:
    force_isa(os.environ["FEDMPQ_ISA"])
