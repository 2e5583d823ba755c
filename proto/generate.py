"""Generates the Python stubs beside every `.proto` file: `python -m fedmpq.proto.generate`.

The stubs are committed, so only who changes a `.proto` needs grpcio-tools (extra `dev`). Its release decides
which protobuf runtimes can load the stubs: 1.76 writes for protobuf 6.31.1, which runtimes 6 and 7 accept.
Where a stub that `fedmpq.proto` imports is missing, run this file by its path instead.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parent


def proto_files() -> list[str]:
    """Paths of all `.proto` files relative to this folder, as imports inside them spell it."""
    return sorted(path.relative_to(SOURCES).as_posix() for path in SOURCES.rglob("*.proto"))


def _has_service(proto: str) -> bool:
    return re.search(r"^service\s", (SOURCES / proto).read_text(encoding="utf-8"), re.MULTILINE) is not None


def _run_protoc(protos: list[str], out: Path) -> None:
    # Only who generates has it, not who checks types.
    import grpc_tools  # type: ignore[import-untyped,import-not-found,unused-ignore]
    from grpc_tools import protoc

    arguments = [
        "protoc",
        f"--proto_path={SOURCES}",
        f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={out}",
        f"--pyi_out={out}",
    ]
    services = [proto for proto in protos if _has_service(proto)]
    runs = [[*arguments, *protos]]
    if services:
        runs.append([*arguments[:3], f"--grpc_python_out={out}", *services])
    for run in runs:
        if protoc.main(run) != 0:
            raise SystemExit("protoc failed; its message is above")


def _adapt(stub: Path, root: Path) -> None:
    """Makes imports relative: protoc's `from fedmpq.v1 import x_pb2` lives in `fedmpq.proto.fedmpq.v1` here.

    Type stubs also say that the bare `Mapping`s protoc writes are meant.
    """
    package = ".".join(stub.parent.relative_to(root).parts)
    text = stub.read_text(encoding="utf-8")
    text = re.sub(rf"^from {re.escape(package)} import ", "from . import ", text, flags=re.MULTILINE)
    if stub.suffix == ".pyi":
        text = f"# mypy: disable-error-code=type-arg\n{text}"
    stub.write_text(text, encoding="utf-8")


def generate(out: Path) -> list[Path]:
    """Writes the stubs of every `.proto` below `out`; gives their paths relative to it."""
    protos = proto_files()
    _run_protoc(protos, out)
    stubs = [
        out / proto.replace(".proto", ending)
        for proto in protos
        for ending in ("_pb2.py", "_pb2.pyi", *(["_pb2_grpc.py"] if _has_service(proto) else []))
    ]
    for stub in stubs:
        _adapt(stub, out)
    return [stub.relative_to(out) for stub in stubs]


if __name__ == "__main__":
    for written in generate(SOURCES):
        sys.stdout.write(f"{written}\n")
