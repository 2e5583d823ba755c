"""One training step on an emulated board with a mark before and after each call of the C++ library.

`counted_step.py ROUND.npz ISA` prints the names of the functions called, in order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedmpq import kernels
from fedmpq.kernels.library import library
from fedmpq.kernels.prototypes import PROTOTYPES
from fedmpq.training import native_step
from fedmpq.training.local_round import run_local_round
from fedmpq.training.native_engine import NativeEngine
from tools import rounds
from tools.instruction_marks import AFTER, BEFORE, marker


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
    # One call after the other, and not many in one go: each is counted by itself.
    vars(native_step)["in_one_go"] = list
    run_local_round(NativeEngine(1), *loaded)
    print(json.dumps(called))


if __name__ == "__main__":
    main()
