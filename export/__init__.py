"""A deployed model in; a verified file for an inference runtime out.

`fedmpq.export` is this room and, called, `exporting.export_model`: `fedmpq.export(model, "garden.onnx")`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A module that can be called; whoever imports a module of this room first, the front door stays open."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from fedmpq.export.exporting import export_model

        return export_model(*arguments, **options)


sys.modules[__name__].__class__ = _Room
