"""The export targets by name, by the ending of a file, and the user's own by `package.module:Class`."""

from __future__ import annotations

import re
from pathlib import Path

from fedmpq.export.executorch.target import ExecuTorchTarget
from fedmpq.export.format import ExportError
from fedmpq.export.onnx.target import OnnxTarget
from fedmpq.export.target import Target
from fedmpq.system.named_object import NamedObjectError, is_path, load_object, require_members, unknown_name

_BUILT_IN: tuple[Target, ...] = (OnnxTarget(), ExecuTorchTarget(), ExecuTorchTarget(compressed=False))
TARGETS: dict[str, Target] = {target.name: target for target in _BUILT_IN}
"""The targets that come along, by name."""

_SUFFIX = re.compile(r"(\.[A-Za-z0-9_-]+)+", re.ASCII)


def find_target(given: Target | type[Target] | str) -> Target:
    """The built-in target of that name, or the user's own: `package.module:Class`, its class or an object.

    Any other name is an error.
    """
    if isinstance(given, str):
        if given in TARGETS:
            return TARGETS[given]
        if not is_path(given):
            raise ExportError(unknown_name("export target", given, TARGETS))
    try:
        if isinstance(given, str):
            return _checked(load_object(given, Target, "export target"))
        made: object = given() if isinstance(given, type) else given
        return _checked(require_members(made, Target, "the export target"))
    except NamedObjectError as error:
        raise ExportError(str(error)) from error


def target_of(path: Path) -> Target:
    """The built-in target whose files' names end like `path`."""
    for target in TARGETS.values():
        if path.name.endswith(target.suffix):
            return target
    endings = ", ".join(f"{target.suffix} ({target.name})" for target in TARGETS.values())
    raise ExportError(f"{path.name!r} ends like the files of no export target; they end in {endings}")


def _checked(target: Target) -> Target:
    what = f"export target {type(target).__name__}"
    for member in ("name", "suffix", "runtime"):
        value: object = getattr(target, member)
        if not isinstance(value, str) or not value:
            raise ExportError(f"{what}: {member} = {value!r} must be text that is not empty")
    if not _SUFFIX.fullmatch(target.suffix):
        raise ExportError(f"{what}: suffix = {target.suffix!r} is no ending such as '.onnx'")
    return target
