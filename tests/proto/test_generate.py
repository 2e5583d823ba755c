"""The committed stubs are what the `.proto` files say, and load with the installed protobuf."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import pytest

from fedmpq.proto import generate, graph_pb2


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools (extra dev) regenerates the stubs")
    stubs = generate.generate(tmp_path)
    assert {stub.name for stub in stubs} >= {"graph_pb2.py", "graph_pb2.pyi"}
    for stub in stubs:
        fresh, committed = (root / stub for root in (tmp_path, generate.SOURCES))
        assert fresh.read_text() == committed.read_text(), f"{stub}: run python -m fedmpq.proto.generate"


def test_no_stub_without_its_proto() -> None:
    sources = {Path(proto).with_suffix("") for proto in generate.proto_files()}
    stubs = {path.relative_to(generate.SOURCES) for path in generate.SOURCES.rglob("*_pb2*.py*")}
    stubs = {stub for stub in stubs if "__pycache__" not in stub.parts}
    assert stubs
    assert {stub.parent / stub.name.split("_pb2")[0] for stub in stubs} == sources


def test_every_message_module_is_reexported() -> None:
    package = importlib.import_module("fedmpq.proto")
    for proto in generate.proto_files():
        assert hasattr(package, f"{Path(proto).stem}_pb2"), proto


def test_stubs_load_with_protobuf_6_and_7() -> None:
    # A runtime loads stubs of its own major version and of the one before.
    for stub in generate.SOURCES.rglob("*_pb2.py"):
        assert "\n# Protobuf Python Version: 6." in stub.read_text(), stub


def test_messages_survive_the_wire() -> None:
    node = graph_pb2.Node(name="pool", inputs=["input"], max_pool=graph_pb2.MaxPool())
    node.max_pool.kernel.height = 3
    assert graph_pb2.Node.FromString(node.SerializeToString()) == node
    assert node.WhichOneof("op") == "max_pool"


def test_every_field_is_documented() -> None:
    for proto in generate.proto_files():
        lines = (generate.SOURCES / proto).read_text().splitlines()
        for above, line in itertools.pairwise(lines):
            in_oneof = line.startswith("    ")
            if not in_oneof and line.startswith(("  ", "message ", "service ")) and not line.endswith("}"):
                assert line.strip().startswith("//") or above.strip().startswith("//"), f"{proto}: {line}"
