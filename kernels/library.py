"""Finds, loads and types `libfedmpq_kernels.so`, and says which instruction set its dispatch uses.

There is no fallback in Python: a library that cannot be loaded is an ImportError that says how to build it.
The environment variable FEDMPQ_ISA forces an instruction set (one of `ISAS`) at import, and FEDMPQ_KERNELS
names another build of the library, such as one with sanitizers.
"""

from __future__ import annotations

import os
from ctypes import CDLL, _SimpleCData, c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path
from typing import Any

ISAS = ("avx512", "avx2", "neon_dot", "neon", "scalar")
PATH = Path(os.environ.get("FEDMPQ_KERNELS", Path(__file__).parent / "libfedmpq_kernels.so"))
HOW_TO_BUILD = "build it with `pip install -e .` in the checkout (needs a C++17 compiler)"

# Result and argument types of each function, in the order of include/fedmpq/kernels.h and training.h.
_I32, _I64, _U32, _F32, _POINTER, _TEXT = c_int32, c_int64, c_uint32, c_float, c_void_p, c_char_p
_RESCALE = (_POINTER, _POINTER, _F32, _F32)
PROTOTYPES: dict[str, tuple[type[_SimpleCData[Any]] | None, tuple[type[_SimpleCData[Any]], ...]]] = {
    "fedmpq_isa": (_TEXT, ()),
    "fedmpq_force_isa": (_I32, (_TEXT,)),
    "fedmpq_pack_planes": (_I64, (_POINTER, _I64, _I32, _POINTER)),
    "fedmpq_unpack_planes": (_I32, (_POINTER, _I64, _I32, _POINTER)),
    "fedmpq_popcount_planes": (None, (_POINTER, _I64, _I32, _POINTER)),
    "fedmpq_magnitude_counts": (_I64, (_POINTER, _I64, _I32, _POINTER)),
    "fedmpq_philox4x32": (None, (_POINTER, _POINTER, _POINTER)),
    "fedmpq_philox_uniform": (None, (_I64, _U32, _U32, _U32, _U32, _U32, _POINTER)),
    "fedmpq_conv_forward": (_I32, (_POINTER, _POINTER, _I32, _I32, _POINTER, _I32, _POINTER, _POINTER)),
    "fedmpq_force_bit_serial": (None, (_I32,)),
    "fedmpq_conv_backward_sums": (
        _I32,
        (*(_POINTER,) * 2, _I32, _I32, *(_POINTER,) * 2, *_RESCALE, *(_POINTER,) * 2, _I32, *(_POINTER,) * 2),
    ),
    "fedmpq_keep": (_I32, (_POINTER, _I32, _I64, _I32, _POINTER)),
    "fedmpq_kept_backward_sums": (
        _I32,
        (_POINTER, _I32, _I64, _I32, _POINTER, *_RESCALE, *(_POINTER,) * 2, _I32, *(_POINTER,) * 2),
    ),
    "fedmpq_conv_backward_input": (_I32, (_POINTER, _POINTER, _POINTER, _F32, _I32, _I32, _POINTER)),
    "fedmpq_conv_backward_weights": (
        _I32,
        (_POINTER, _POINTER, _I32, _I32, _POINTER, _POINTER, _I32, _POINTER),
    ),
    "fedmpq_requantize": (_I32, (_POINTER, _I32, _I64, _I32, *_RESCALE, _I32, _I32, _POINTER)),
    "fedmpq_backward_error": (
        None,
        (_POINTER, _POINTER, _I32, _I64, _I32, *_RESCALE, *(_POINTER,) * 5, _I32, _POINTER, _POINTER),
    ),
    "fedmpq_quantize_error": (None, (_POINTER, _I32, _I64, _F32, *(_U32,) * 5, _I32, _POINTER)),
    "fedmpq_add": (_I32, (_POINTER, _POINTER, _I32, _I64, _F32, _F32, _F32, _I32, _I32, _POINTER, _POINTER)),
    "fedmpq_pass_error": (_I32, (_POINTER, _I32, _I64, _I32, _POINTER, _POINTER)),
    "fedmpq_add_errors": (None, (_POINTER, _I64, _POINTER)),
    "fedmpq_max_pool": (_I32, (_POINTER, _POINTER, _I32, _I32, _POINTER)),
    "fedmpq_max_pool_backward": (_I32, (_POINTER, _POINTER, _I32, _POINTER, _I32, _POINTER)),
    "fedmpq_average_pool": (_I32, (_POINTER, _POINTER, _I32, _I32, _F32, _F32, _F32, _I32, _POINTER)),
    "fedmpq_average_pool_backward": (_I32, (_POINTER, _POINTER, _I32, _POINTER)),
    "fedmpq_softmax_loss": (_I32, (_POINTER, _I32, _I32, *(_POINTER,) * 5)),
    "fedmpq_halve_errors": (_F32, (_POINTER, _I64, _I32, _POINTER, _POINTER)),
    "fedmpq_update_codes": (_I32, (_POINTER, _POINTER, _POINTER)),
}


def load(path: Path) -> CDLL:
    """The library at `path` with every function's argument and result types set."""
    try:
        loaded = CDLL(str(path))
    except OSError as error:
        raise ImportError(f"fedmpq.kernels: cannot load {path.name} ({error}); {HOW_TO_BUILD}") from error
    for name, (result, arguments) in PROTOTYPES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError as error:
            raise ImportError(
                f"fedmpq.kernels: {path.name} lacks {name}, so it is older than its sources; {HOW_TO_BUILD}"
            ) from error
        function.restype = result
        function.argtypes = arguments
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


def supported_isas() -> tuple[str, ...]:
    """The instruction sets this CPU and this build have, best first; "scalar" is always among them."""
    before = isa()
    supported = tuple(name for name in ISAS if library.fedmpq_force_isa(name.encode()) == 0)
    force_isa(before)
    return supported


if "FEDMPQ_ISA" in os.environ:
    force_isa(os.environ["FEDMPQ_ISA"])
