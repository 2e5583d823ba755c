"""Imports torchvision where its compiled operators do not fit the installed torch.

The torchvision wheel is built for one torch build; beside the CPU build its library does not load. Its
networks need none of those operators, but `import torchvision` attaches shape functions to two detection
operators and fails when they do not exist. Declaring the two (a schema, no implementation) is enough; calling
them still fails, as it should.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
from typing import Any

_DETECTION_OPERATORS = ("nms", "qnms")


@functools.cache
def import_torchvision() -> Any:
    """The torchvision module."""
    from torch import library

    if not _load_operators():
        for operator in _DETECTION_OPERATORS:
            library.define(
                f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
    return importlib.import_module("torchvision")


def _load_operators() -> bool:
    """Whether torchvision's compiled operators are there; loads them as torchvision itself would.

    This must be known before the import: declaring an operator that the library then registers fails as well.
    """
    import torch

    package = importlib.util.find_spec("torchvision")
    for folder in (package and package.submodule_search_locations) or ():
        finder = importlib.machinery.FileFinder(
            folder, (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES)
        )
        library = finder.find_spec("_C")
        if library is not None and library.origin is not None:
            try:
                torch.ops.load_library(library.origin)  # type: ignore[no-untyped-call]
            except (ImportError, OSError):
                return False
            return True
    return False
