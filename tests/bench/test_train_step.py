import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from torch import fx, nn

from bench import memory, performance, torch_rivals, train_step, workload
from bench.machine import Machine, cores_in_use
from bench.memory import Growth
from bench.pages import with_generated
from bench.timing import Spread
from bench.train_step import Case, Result
from bench.workload import Workload, make_workload
from fedmpq import kernels
from fedmpq.model.graph import Relu
from fedmpq.model.quantized import average_bits

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def work() -> Workload:
    return make_workload("digits_cnn", 2)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "TURN_SECONDS", 1e-3)


def invented(threads: int = 1) -> Result:
    spread = Spread(2.0, 1.5, 2.5)
    return Result(
        case=Case("resnet20", 64, threads),
        isa="avx512",
        torch_isa="avx512",
        bits="3 to 7, 4.00 on average",
        image=(3, 32, 32),
        seconds=dict.fromkeys(("native", "torch_fp32", "qat", "torch_engine"), spread),
        speedups=dict.fromkeys(("torch_fp32", "qat", "torch_engine"), spread),
        memory={"native": Growth(10.0, 1.0, 50.0), "torch": Growth(150.0, 20.0, 500.0)},
        load_before=[0.5, 0.5, 0.5],
        load_after=[1.0, 0.5, 0.5],
    )


@pytest.mark.usefixtures("quick")
def test_json_is_one_object_with_the_promised_facts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = kernels.isa()
    monkeypatch.setattr(train_step, "MODELS", {"digits_cnn": (3, 32, 32)})
    monkeypatch.setattr(train_step, "BATCHES", (2,))
    options = ["--model", "digits_cnn", "--batch", "2", "--isa", "scalar", "--threads", "2"]
    monkeypatch.setattr("sys.argv", ["train_step", *options, "--repetitions", "1", "--json"])
    try:
        train_step.main()
    finally:
        kernels.force_isa(before)
    facts = json.loads(capsys.readouterr().out)
    assert facts["isa"] == "scalar"
    assert (facts["model"], facts["batch"], facts["threads"], facts["update"]) == (
        "digits_cnn",
        2,
        2,
        "paper",
    )
    ratios = ("speedup_vs_torch_fp32", "speedup_vs_qat", "speedup_vs_torch_engine")
    for name in ratios:
        assert facts[name] == pytest.approx(facts["spreads"][name]["median"], abs=1e-3)
        assert facts[name] > 0
    # The native process holds no torch, whose own pages alone are more than all of its memory.
    assert 0 < facts["memory_growth_mb"] < facts["memory_peak_mb"] < facts["torch_memory_peak_mb"]
    assert facts["torch_memory_growth_mb"] > 0
    assert facts["cpu_model"]
    assert len(facts["load_average_before"]) == len(facts["load_average_after"]) == 3


def test_several_cases_are_a_list_in_one_object() -> None:
    facts = train_step.as_object([invented(), invented()])
    assert [each["speedup_vs_torch_fp32"] for each in facts["results"]] == [2.0, 2.0]
    assert "speedup_vs_torch_fp32" not in facts


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--threads", "0"], "outside 1.."),
        (["--repetitions", "0"], "the least is 1"),
        (["--isa", "mmx"], "invalid choice"),
        (["--profile", "--json"], "leave --json out"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["train_step", *options])
    with pytest.raises(SystemExit):
        train_step.main()
    assert complaint in capsys.readouterr().err


def test_times_are_per_step_of_equal_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_step, "TURN_SECONDS", 0.02)
    turns: list[tuple[str, int]] = []

    def train(name: str, seconds: float, steps: int) -> None:
        turns.append((name, steps))
        time.sleep(seconds * steps)

    timings = train_step.paired({"a": partial(train, "a", 0.002), "b": partial(train, "b", 0.05)}, 3)
    (first, many), (second, one) = turns[-2:]
    assert (first, second, one) == ("a", "b", 1)
    assert 1 < many <= 10
    assert turns[-6:] == [("a", many), ("b", 1)] * 3
    assert min(timings.seconds["a"]) >= 0.002
    assert timings.ratio("b", "a").median > 2


def test_bits_are_mixed_and_keep_to_the_budget(work: Workload) -> None:
    assert len(set(work.bit_widths)) > 1
    assert min(work.bit_widths) >= 2
    assert 3.5 < average_bits(work.bit_widths, work.graph.layer_sizes) <= workload.BUDGET


def test_a_stored_workload_is_the_same(work: Workload, tmp_path: Path) -> None:
    work.save(tmp_path / "workload.npz")
    again = Workload.load(tmp_path / "workload.npz")
    assert again.graph == work.graph
    assert again.bit_widths == work.bit_widths
    for name, layer in work.layers.items():
        assert_array_equal(again.layers[name].codes, layer.codes)
        assert_array_equal(again.layers[name].step, layer.step)
    for name, tensor in work.side.items():
        assert_array_equal(again.side[name], tensor)
    for (images, labels), (other_images, other_labels) in zip(work.batches, again.batches, strict=True):
        assert_array_equal(images, other_images)
        assert_array_equal(labels, other_labels)


def test_growth_is_the_peak_and_not_what_is_left() -> None:
    script = (
        "import numpy as np\n"
        "from bench import memory\n"
        "before = np.ones(10_000_000)\n"
        "del before\n"
        "print(memory.measured(lambda: np.ones(5_000_000).sum()).growth_mb)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(40, abs=4)


def test_a_failed_memory_process_says_why(work: Workload) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)memory of native failed: .*not available here"):
        memory.growths(work, 1, "mmx", "paper")


def test_fake_quantization_rounds_every_weight_and_every_relu(work: Workload) -> None:
    module = torch_rivals.fake_quantized(torch_rivals.float_module(work))
    layers = [part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    assert len(layers) == len(work.graph.layers)
    for layer in layers:
        assert len(torch.unique(layer.weight)) <= 255
    assert rounded_activations(module) == sum(isinstance(node.op, Relu) for node in work.graph.nodes)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    torch_rivals.trainer(module, torch_rivals.float_batches(work))(1)
    moved = [bool((old != new).any()) for old, new in zip(before, module.parameters(), strict=True)]
    assert all(moved), "every parameter gets a gradient through the rounding"


def test_fake_quantization_finds_a_relu_that_is_a_module_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU6(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.relu(x)
            z: torch.Tensor = self.relu(y - 1)
            return z

    module = torch_rivals.fake_quantized(Twice())
    assert rounded_activations(module) == 2
    expected = torch_rivals._fake_activation(torch.tensor([-1.0, 0.31, 1.32, 9.0]))
    expected = torch_rivals._fake_activation((expected - 1).relu())
    assert torch.equal(module(torch.tensor([-1.0, 0.31, 1.32, 9.0])), expected)


def rounded_activations(module: fx.GraphModule) -> int:
    return sum(node.target is torch_rivals._fake_activation for node in module.graph.nodes)


def test_fake_activations_have_sixteen_levels() -> None:
    x = torch.linspace(-1, 5, 1000)
    levels = torch.unique(torch_rivals._fake_activation(x))
    expected = np.arange(16) * torch_rivals.ACTIVATION_CLIP / 15
    np.testing.assert_allclose(levels.numpy(), expected, rtol=1e-6)


def test_only_what_is_between_the_markers_is_replaced() -> None:
    page = f"head\n{performance.BEGIN}\nold\n{performance.END}\ntail\n"
    written = with_generated(page, "new", performance.BEGIN, performance.END)
    assert written == f"head\n{performance.BEGIN}\nnew\n{performance.END}\ntail\n"
    assert with_generated(written, "new", performance.BEGIN, performance.END) == written
    with pytest.raises(ValueError, match="lacks its markers"):
        with_generated("no markers", "new", performance.BEGIN, performance.END)


def test_the_page_in_the_repository_can_be_written_into() -> None:
    page = performance.PAGE.read_text(encoding="utf-8")
    assert "\nnew\n" in with_generated(page, "new", performance.BEGIN, performance.END)


def test_a_busy_machine_is_told_of() -> None:
    machine = Machine.here()
    assert machine.cores >= 1
    assert "machine was busy" in performance.described(machine, machine.cores / 2, (0.0, 0.0))
    assert "machine was busy" not in performance.described(machine, 0.1, (9.0, 9.0))


def test_cores_in_use_are_counted() -> None:
    until = time.monotonic() + 0.6
    burning = threading.Thread(target=lambda: [None for _ in iter(lambda: time.monotonic() < until, False)])
    burning.start()
    assert cores_in_use(0.5) > 0.2
    burning.join()


def test_tables_have_a_row_for_each_result() -> None:
    results = [invented().as_dict(), invented(2).as_dict()]
    rows = performance.step_table(results).splitlines()
    assert len(rows) == 4
    assert len({row.count("|") for row in rows}) == 1
    assert "| **2.00** (1.50 to 2.50) |" in rows[2]
