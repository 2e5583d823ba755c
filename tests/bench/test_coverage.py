"""The table of torchvision's classifiers, and the processes that fill it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import coverage, coverage_stage
from bench.classifiers import CLASSIFIERS
from bench.coverage import Found, Limits
from bench.pages import with_generated

TRAINED: dict[str, Any] = {
    "parameters": 1000,
    "layers": 3,
    "native_loss": 2.25,
    "torch_loss": 2.5,
    "speedup": 1.75,
    "load_average": 1.0,
}
EXPORTED: dict[str, Any] = {"file_bytes": 500, "speedup": 3.0, "load_average": 2.5}


def test_the_table_tells_what_is_whole_what_was_refused_and_what_was_not_tried(tmp_path: Path) -> None:
    found = Found(tmp_path)
    for name, stages in {
        "alexnet": {"train": TRAINED, "onnx": EXPORTED, "executorch": EXPORTED},
        "vgg11": {"train": TRAINED, "onnx": EXPORTED, "executorch": {"error": "no room"}},
        "resnet18": {"train": TRAINED, "onnx": EXPORTED},
        "swin_t": {"train": {"error": "permute"}},
    }.items():
        for stage, facts in stages.items():
            found.put(name, 64, stage, facts)
    lines = coverage.table(dict.fromkeys(("alexnet", "vgg11", "resnet18", "swin_t"), 64), found).splitlines()
    assert lines[0] == (
        "**1 of 4** trace, train and export verified to both runtimes."
        " The machine's load average was 1.0 to 2.5 meanwhile."
    )
    assert lines[4:8] == [
        "| `alexnet` | 64 | 1,000 | 3 | 2.2500, 2.5000 | 1.75 | 12.5%, 3.00 | 12.5%, 3.00 |",
        "| `vgg11` | 64 | 1,000 | 3 | 2.2500, 2.5000 | 1.75 | 12.5%, 3.00 | no |",
        "| `resnet18` | 64 | 1,000 | 3 | 2.2500, 2.5000 | 1.75 | 12.5%, 3.00 | not tried |",
        "| `swin_t` | 64 |  |  | refused |  |  |  |",
    ]
    assert lines[9:] == ["- vgg11, executorch: `no room`", "- swin_t, train: `permute`"]


def test_the_page_in_the_repository_can_be_written_into() -> None:
    page = coverage.PAGE.read_text(encoding="utf-8")
    assert "\nnew\n" in with_generated(page, "new", coverage.BEGIN, coverage.END)


def test_a_stage_that_takes_too_long_is_ended_and_told() -> None:
    facts = coverage.measured("resnet18", 64, "train", Limits(minutes=0.0005))
    assert facts == {"error": "not done after 0.0005 minutes"}


@pytest.mark.slow
def test_a_network_is_measured_once_and_a_refusal_is_told_in_its_own_words(tmp_path: Path) -> None:
    page, found = tmp_path / "page.md", Found(tmp_path / "kept")
    page.write_text(f"{coverage.BEGIN}\n{coverage.END}\n")
    # The first has come through already: measured again, its loss would be another.
    found.put("alexnet", 64, "train", TRAINED)
    words = ["--only", "alexnet", "--only", "swin_t", "--stage", "train", "--cache", str(found.folder)]
    coverage.main([*words, "--page", str(page)])
    assert found.get("alexnet", 64, "train") == TRAINED
    written = page.read_text()
    assert "| `alexnet` | 64 | 1,000 | 3 | 2.2500, 2.5000 | 1.75 | not tried | not tried |" in written
    assert "swin_t, train: `TraceError: aten.permute" in written
    assert written.count("| `") == len(CLASSIFIERS)


@pytest.mark.slow
def test_a_network_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage_stage, "INFERENCE_SECONDS", 1e-3)
    exported = coverage_stage.STAGES["onnx"]("squeezenet1_1", 32)
    assert exported["verified_images"] == 16
    assert exported["file_bytes"] < 4 * 727_626 / 5
    assert exported["speedup"] > 0
