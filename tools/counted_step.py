"""One training step on an emulated board with a mark before and after each call of the C++ library.

`counted_step.py ROUND.npz ISA` prints the names of the functions called, in order. A mark is HINT #64 before
and HINT #65 after: instructions that do nothing, and that instruction_counter.c sees.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmpq import kernels
from fedmpq.edge_client.local_round import run_local_round
from fedmpq.edge_client.native_engine import NativeEngine
from fedmpq.kernels.library import PROTOTYPES, library
from tools import rounds

BEFORE, AFTER = 64, 65
_HINT, _RETURN = 0xD503201F, 0xD65F03C0


def marker(number: int) -> Callable[[], None]:
    """A function of two instructions: HINT #number, and back."""
    executable = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=executable)
    code.write((_HINT | number << 5).to_bytes(4, "little") + _RETURN.to_bytes(4, "little"))
    function = ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    _kept.append(code)
    return function


_kept: list[mmap.mmap] = []


def main() -> None:
    before, after = marker(BEFORE), marker(AFTER)
    called: list[str] = []

    def marked(name: str, function: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            called.append(name)
            before()
            result = function(*arguments)
            after()
            return result

        return call

    kernels.force_isa(sys.argv[2])
    loaded = rounds.load(Path(sys.argv[1]))
    for name in PROTOTYPES:
        if name not in ("fedmpq_isa", "fedmpq_force_isa"):
            setattr(library, name, marked(name, getattr(library, name)))
    run_local_round(NativeEngine(1), *loaded)
    print(json.dumps(called))


if __name__ == "__main__":
    main()
