"""One model trained across boards too small for it, and shipped to each in the bits it can run.

    import fedmpq
    run = fedmpq.simulate(model=my_module, data=my_dataset, budgets=[2, 4, 8], rounds=20)
    model = run.deployed(budget=4)
    model.predict(images)
    fedmpq.export(model, "garden.onnx")

    q = fedmpq.quantize(trained_module, budget=4, calibration=images)

Names are loaded when they are first used: importing this costs next to nothing, and no torch. docs/python.md
says more.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedmpq.data.dataset import Dataset
    from fedmpq.exchange.messages import Assignment, Calibration, Update
    from fedmpq.export.exporting import export_model as export
    from fedmpq.lab.notebook import simulate
    from fedmpq.lab.run import Run, load_run
    from fedmpq.method.history import History
    from fedmpq.method.protocol import IntegerMethod
    from fedmpq.method.quantize import quantize
    from fedmpq.method.quantized_method import QuantizedMethod
    from fedmpq.method.state import ClientRecord, GlobalModel
    from fedmpq.model.deployed import DeployedModel

    __version__: str

_HOMES = {
    "Assignment": "fedmpq.exchange.messages",
    "Calibration": "fedmpq.exchange.messages",
    "ClientRecord": "fedmpq.method.state",
    "Dataset": "fedmpq.data.dataset",
    "DeployedModel": "fedmpq.model.deployed",
    "GlobalModel": "fedmpq.method.state",
    "History": "fedmpq.method.history",
    "IntegerMethod": "fedmpq.method.protocol",
    "QuantizedMethod": "fedmpq.method.quantized_method",
    "Run": "fedmpq.lab.run",
    "Update": "fedmpq.exchange.messages",
    "load_run": "fedmpq.lab.run",
    "quantize": "fedmpq.method.quantize",
    "simulate": "fedmpq.lab.notebook",
}

__all__ = [
    "Assignment",
    "Calibration",
    "ClientRecord",
    "Dataset",
    "DeployedModel",
    "GlobalModel",
    "History",
    "IntegerMethod",
    "QuantizedMethod",
    "Run",
    "Update",
    "__version__",
    "export",
    "load_run",
    "quantize",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("fedmpq")
    if name == "export":
        # The function and the room share a name; the room's module can be called.
        return import_module("fedmpq.export")
    if name not in _HOMES:
        raise AttributeError(f"module 'fedmpq' has no attribute {name!r}")
    value = _loaded(name)
    globals()[name] = value
    return value


def _loaded(name: str) -> Any:
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("fedmpq"):
            raise
        raise ModuleNotFoundError(
            f'fedmpq.{name} needs {error.name!r}, which is not installed; pip install "fedmpq[lab]"',
            name=error.name,
        ) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
