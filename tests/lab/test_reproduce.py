"""`fedmpq reproduce`: cells side by side, broken off and gone on with, and the files it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmpq.cli import reproduce_command
from fedmpq.cli.main import main
from fedmpq.cli.reproduce_command import cell_name, make_plan
from fedmpq.lab import cells as cells_module
from fedmpq.lab import paper_tables, simulation
from fedmpq.lab.cells import Cell, Clock, Ended, Slots, Status, Watcher, cell_bytes, run_cells, slots_for
from fedmpq.lab.checkpoint import load_checkpoint
from fedmpq.lab.experiment import Experiment, ExperimentError, make_experiment
from fedmpq.lab.paper_tables import DATA_SETS, ON_REQUEST, TABLES
from fedmpq.lab.round_log import LOG_NAME, RoundResult, read_log
from fedmpq.lab.scales import SCALES, Cut, Scale
from fedmpq.lab.stored_data import store_data
from tests.in_process import InProcessPool

Capture = pytest.CaptureFixture[str]
TOY = Scale(
    "mid",
    cut=Cut(train_limit=80, test_limit=40, rounds=2, epochs=1),
    local_epochs=(1, 2),
    settings={"batch_size": 8},
)
SMALL: dict[str, Any] = {
    "data": "digits",
    "model": "digits_cnn",
    "train_limit": 80,
    "test_limit": 40,
    "budgets": [2, 4, 8],
    "participation": 1,
    "rounds": 2,
    "epochs": 1,
    "batch_size": 8,
}


def cell(folder: Path, **changes: object) -> Cell:
    experiment = make_experiment({**SMALL, **changes})
    return Cell(experiment, folder / f"{experiment.label}-{experiment.seed}")


def without_time(results: Sequence[RoundResult]) -> list[RoundResult]:
    return [replace(result, seconds=0.0, phases={}) for result in results]


def silent(_: object) -> None:
    pass


def run_here(cells: Sequence[Cell], slots: Slots, watch: Watcher) -> None:
    """`run_cells` one after the other in this process."""
    for index, each in enumerate(cells):
        cells_module._run_cell(each, 1)
        watch(Status((), len(cells) - index - 1, Ended(each)))


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "WorkerPool", InProcessPool)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_process: None) -> None:
    """Digits in the place of CIFAR-10, in an empty folder, with cells in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SCALES, "mid", TOY)
    monkeypatch.setattr(paper_tables, "DATA_SETS", (replace(DATA_SETS[0], model="digits_cnn"),))
    monkeypatch.setattr(reproduce_command, "run_cells", run_here)


def reproduce(capsys: Capture, *words: str) -> tuple[int, str, str]:
    try:
        code = main(["reproduce", *words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


# Many cells


@pytest.mark.slow
def test_cells_side_by_side_are_the_same_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes; one cell was broken off after its first round, and one cannot run."""
    data, many = str(store_data("digits", TOY, tmp_path / "data").path), tmp_path / "many"
    broken, whole = cell(many, data=data), cell(many, data=data, method="aqfl", seed=3)
    wild = cell(many, data=data, method="fp32", learning_rate=1e30)
    with monkeypatch.context() as patched:
        patched.setattr(simulation, "WorkerPool", InProcessPool)
        stop_after_a_round(broken)
    assert broken.rounds_done == 1
    heard: list[Status] = []
    run_cells([broken, whole, wild], Slots(2, 2), heard.append)
    ended = {status.ended.cell: status.ended.failure for status in heard if status.ended}
    assert ended.keys() == {broken, whole, wild}
    assert ended[broken] is ended[whole] is None
    assert "learning rate" in (ended[wild] or "")
    assert max(len(status.running) for status in heard) == 2
    monkeypatch.setattr(simulation, "WorkerPool", InProcessPool)
    for done in (broken, whole):
        alone = Cell(done.experiment, tmp_path / "alone" / done.folder.name)
        simulation.run(simulation.prepare(alone.experiment), alone.folder, 1, silent)
        assert without_time(done.results()) == without_time(alone.results())
        assert len(done.finished_results() or []) == 2
    assert wild.finished_results() is None


class Crash(Exception):
    pass


def stop_after_a_round(cell: Cell) -> None:
    def listener(progress: simulation.Progress) -> None:
        if progress.round == 2:
            raise Crash

    with pytest.raises(Crash):
        simulation.run(simulation.prepare(cell.experiment), cell.folder, 1, listener)


@pytest.mark.slow
def test_a_folder_of_another_experiment_is_refused(tmp_path: Path, in_process: None) -> None:
    one = cell(tmp_path)
    assert one.results() == []
    assert one.rounds_done == 0
    cells_module._run_cell(one, 1)
    assert len(one.results()) == one.rounds_done == 2
    other = Cell(replace(one.experiment, learning_rate=0.05), one.folder)
    with pytest.raises(ExperimentError, match="holds a run with other settings; choose another --out"):
        other.results()
    (one.folder / LOG_NAME).write_text("rubbish\n")
    with pytest.raises(ExperimentError, match="holds a run with other settings"):
        one.results()


@given(
    cells=st.integers(1, 200),
    workers=st.integers(1, 128),
    memory=st.integers(0, 200),
    clients=st.integers(1, 20),
)
def test_workers_are_shared_out_and_never_overbooked(
    cells: int, workers: int, memory: int, clients: int
) -> None:
    slots = slots_for(cells, workers, 10**9, memory * 10**9)
    assert slots.workers <= max(1, min(workers, memory))
    free, waiting, shares = slots.workers, cells, list[int]()
    while waiting and free and len(shares) < slots.cells:
        shares.append(slots.share(free, len(shares), waiting, clients))
        free, waiting = free - shares[-1], waiting - 1
    assert sum(shares) <= slots.workers
    assert len(shares) == slots.cells
    assert max(shares) - min(shares) <= 1
    # Idle are only those that could not help: as many as a round has clients work in every cell.
    assert free == 0 or min(shares) == clients


def test_memory_grows_with_the_images() -> None:
    """ResNet-44 at 64x64 trains in a few gigabytes, ResNet-20 at 16x16 in less than one."""
    assert cell_bytes(16, 20, 64) < 10**9
    assert 2 * 10**9 < cell_bytes(64, 44, 64) < 5 * 10**9
    with pytest.raises(ValueError, match="3 cells with 2 workers"):
        Slots(3, 2)


@pytest.mark.slow
def test_time_left_is_that_of_the_rounds_left(tmp_path: Path, in_process: None) -> None:
    done, more, long = cell(tmp_path), cell(tmp_path, seed=1), cell(tmp_path, seed=2, epochs=3)
    other = cell(tmp_path, method="fp32")
    clock = Clock([more, long, other], Slots(2, 2))
    assert clock.seconds_left() is None
    cells_module._run_cell(done, 1)
    clock.add(done, [replace(result, seconds=10.0) for result in done.results()])
    # 2 rounds of 1 epoch and 2 of 3 at 10 s each; a method not seen yet costs as much; two at a time.
    assert clock.seconds_left() == pytest.approx((20 + 60 + 20) / 2)
    cells_module._run_cell(more, 1)
    assert clock.seconds_left() == pytest.approx((60 + 20) / 2)


# The paper's scale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("classes", "side", "model", "layers"), [(10, 32, "resnet20", 22), (202, 64, "resnet44", 46)]
)
def test_the_paper_scale_starts(tmp_path: Path, classes: int, side: int, model: str, layers: int) -> None:
    """Prepared as it would run, on images of the paper's size; nobody waits for it here."""
    labels = np.arange(600) % classes
    pixels = np.random.default_rng(0).integers(0, 255, (len(labels), side, side, 3)).astype(np.uint8)
    data = tmp_path / "data.npz"
    np.savez(data, x_train=pixels, y_train=labels, x_test=pixels[:20], y_test=labels[:20])
    options = Namespace(table="table1", only=(), alpha=(), seeds=(0, 1, 2))
    plan = make_plan(options, SCALES["paper"], str(data), tmp_path / "out")
    assert len(plan.cells) == 54
    assert len({each.folder for each in plan.cells.values()}) == 54
    for row in ("fp32", "fpq8", "fedmpq"):
        experiment = plan.cells[row, "1", 2].experiment
        prepared = simulation.prepare(experiment)
        assert (experiment.rounds, experiment.epochs, experiment.batch_size) == (50, 5, 64)
        assert (experiment.model, experiment.size, experiment.train_limit) == (model, None, None)
        assert len(prepared.train) == 600
        assert prepared.train.image_shape == (side, side, 3)
        assert len(prepared.start.graph.layers) == layers
        assert len(prepared.start.model.clients) == 10


# The command


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_another_number_of_rounds_has_cells_and_files_of_its_own(capsys: Capture) -> None:
    words = ["table1", "--data", "digits", "--only", "fedmpq", "--alpha", "1", "--seeds", "0", "--out", "out"]
    assert reproduce(capsys, *words)[0] == 0
    code, out, _ = reproduce(capsys, *words, "--rounds", "3")
    assert code == 0
    assert "  3 rounds of 1 local epochs (paper: 50 of 5)" in out.splitlines()
    name = "cifar10-fedmpq-paper-alpha1-epochs1"
    assert [len(read_log(Path("out/cells") / f"{name}{more}-seed0")) for more in ("", "-rounds3")] == [2, 3]
    assert "--rounds 3 " in Path("out/table1-cifar10-rounds3-alpha1-fedmpq.md").read_text()
    assert "--rounds" not in Path("out/table1-cifar10-alpha1-fedmpq.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_table_is_run_written_and_gone_on_with(capsys: Capture) -> None:
    words = ["table1", "--data", "digits", "--only", "fp32,fedmpq", "--alpha", "0.5", "--out", "out"]
    code, out, err = reproduce(capsys, *words, "--seeds", "0")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Table 1, CIFAR-10, scale mid"
    assert "  80 training images (paper: 50,000), 40 test images (paper: 10,000)" in lines
    assert "  2 rounds of 1 local epochs (paper: 50 of 5)" in lines
    assert "  batch_size 8" in lines
    assert "2 of 2 cells to run" in out
    assert "[2/2] cifar10-fedmpq-paper-alpha0.5-epochs1-seed0: deployed " in out
    assert {path.name for path in Path("out").iterdir()} == {
        "cells",
        "data",
        *(f"table1-cifar10-alpha0.5-fp32,fedmpq.{suffix}" for suffix in ("md", "csv", "json", "png")),
    }
    folder = Path("out/cells/cifar10-fedmpq-paper-alpha0.5-epochs1-seed0")
    results = [result.accuracies for result in read_log(folder) if result.accuracies]
    assert len(results) == 2
    expected = 100 * results[-1].mean_deployed
    text = Path("out/table1-cifar10-alpha0.5-fp32,fedmpq.md").read_text()
    assert f"| FedMPQ | {expected:.1f} | " in text
    assert "- top-1 test accuracy in % after the last round, seed 0. Deployed: " in text
    assert (
        "    fedmpq reproduce table1 --data digits --scale mid --seeds 0 --only fp32,fedmpq --alpha 0.5"
        in text
    )
    record = json.loads(Path("out/table1-cifar10-alpha0.5-fp32,fedmpq.json").read_text())
    assert record["common_settings"]["rounds"] == 2
    assert make_experiment(record["cells"]["fp32, 0.5, seed 0"]).method == "fp32"
    # One seed more: only its cells run.
    code, out, _ = reproduce(capsys, *words, "--seeds", "0,1")
    assert code == 0
    assert "2 of 4 cells to run" in out
    assert "±" in Path("out/table1-cifar10-alpha0.5-fp32,fedmpq.md").read_text()
    assert "all 4 cells were finished before" in reproduce(capsys, *words, "--seeds", "0,1")[1]
    # Another table finds what it has in common with this one.
    words = ["table4", "--data", "digits", "--only", "aqfl,fedmpq", "--out", "out", "--seeds", "0"]
    assert "1 of 2 cells to run" in reproduce(capsys, *words)[1]


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_json_is_all_there_is_on_standard_output(capsys: Capture) -> None:
    words = ["epochs", "--data", "digits", "--only", "fpq8", "--seeds", "5", "--json"]
    code, out, err = reproduce(capsys, *words)
    assert code == 0
    first, second, table = (json.loads(line) for line in out.splitlines())
    assert [first["type"], second["type"], table["type"]] == ["cell", "cell", "table"]
    assert first["cell"] == "cifar10-fpq8-paper-alpha0.5-epochs1-seed5"
    assert table["cells"]["fpq8, 2"]["deployed"]["value"] == pytest.approx(100 * second["mean_deployed"])
    assert "written: runs/reproduce-mid/epochs-cifar10-fpq8.md" in err


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--data digits --only fedmqp", "table1 has no row 'fedmqp'; --only takes fp32"),
        ("--data digits --workers 0", "--workers 0 is too small; the least is 1"),
        ("--data nowhere", "nowhere: neither a known data set"),
        ("--data digits --alpha -1", "alpha = -1.0 must be positive"),
        ("--data digits --seeds 0,x", "argument --seeds: '0,x' is not a list of numbers such as 0,1,2"),
        ("--data digits --scale tiny", "argument --scale: invalid choice: 'tiny'"),
        ("", "the following arguments are required: --data"),
    ],
)
def test_a_mistake_is_one_line(capsys: Capture, words: str, expected: str) -> None:
    code, _, err = reproduce(capsys, "table1", *words.split())
    assert code == 2
    assert err.startswith(f"fedmpq reproduce: {expected}")
    assert err.count("\n") == 1
    assert not Path("runs/reproduce-mid/cells").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_cell_that_fails_is_told_and_the_table_written(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_last(cells: Sequence[Cell], slots: Slots, watch: Watcher) -> None:
        run_here(cells[:-1], slots, watch)
        watch(Status((), 0, Ended(cells[-1], "the loss is nan")))

    monkeypatch.setattr(reproduce_command, "run_cells", fail_last)
    words = ["table1", "--data", "digits", "--only", "fp32,aqfl", "--alpha", "1", "--seeds", "0"]
    code, out, _ = reproduce(capsys, *words)
    assert code == 1
    assert "failed: cifar10-aqfl-paper-alpha1-epochs1-seed0: the loss is nan" in out
    written = Path("runs/reproduce-mid/table1-cifar10-alpha1-fp32,aqfl.md").read_text()
    assert "| AQFL | – | – | 62.1 |" in written


# The data


def test_stored_images_are_those_of_a_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale = replace(TOY, cut=replace(TOY.cut, size=6))
    stored = store_data("digits", scale, tmp_path)
    settings = {**SMALL, "size": 6, "budgets": [2, 8]}
    direct = simulation.prepare(make_experiment({**settings, "data": "digits"}))
    by_file = simulation.prepare(make_experiment({**settings, "data": str(stored.path)}))
    np.testing.assert_array_equal(direct.train.images, by_file.train.images)
    np.testing.assert_array_equal(direct.test.labels, by_file.test.labels)
    assert direct.train.class_names == by_file.train.class_names
    assert (stored.train_images, stored.test_images, stored.side) == (80, 40, 6)
    # Found again without loading, and never mixed with another cut or another set.
    with monkeypatch.context() as patched:
        patched.setattr("fedmpq.lab.stored_data.load_named", None)
        assert store_data("digits", scale, tmp_path) == stored
    with pytest.raises(ExperimentError, match="is of another scale than mid; choose another --out"):
        store_data("digits", replace(scale, cut=replace(scale.cut, train_limit=70)), tmp_path)
    with pytest.raises(ExperimentError, match="is of another scale than mid; choose another --out"):
        store_data("digits", TOY, tmp_path)
    other = str(stored.path)
    with pytest.raises(ExperimentError, match=r"holds another CIFAR-10 than .*npz; choose another --out"):
        store_data(other, scale, tmp_path)
    stored.path.write_bytes(b"cut off")
    with pytest.raises(ExperimentError, match=r"cifar10.npz is missing or damaged; remove cifar10.json"):
        store_data("digits", scale, tmp_path)


def test_a_cells_name_says_what_sets_it_apart() -> None:
    def name(**changes: Any) -> str:
        return cell_name(DATA_SETS[0], replace(Experiment("x", profile="paper"), **changes), scale_rounds=50)

    assert name() == "cifar10-fedmpq-paper-alpha0.5-epochs5-seed0"
    assert name(profile="best", averaging=0.0) == "cifar10-fedmpq-best-alpha0.5-epochs5-averaging0-seed0"
    assert name(rounds=80) == "cifar10-fedmpq-paper-alpha0.5-epochs5-rounds80-seed0"
    assert name(lasso=0.1, prune_density=0.05) == (
        "cifar10-fedmpq-paper-alpha0.5-epochs5-prune-density0.05-lasso0.1-seed0"
    )
    assert name(learning_rate=0.03, schedule="cosine", warmup=2) == (
        "cifar10-fedmpq-paper-alpha0.5-epochs5-learning-rate0.03-schedule-cosine-warmup-2-seed0"
    )
    assert name(profile="best", momentum_bits=32, averaging=0.9, statistics="averaged") == (
        "cifar10-fedmpq-best-alpha0.5-epochs5-momentum_bits-32-averaging0.9-statistics-averaged-seed0"
    )
    assert name(profile="best", first_clips=1.0) == "cifar10-fedmpq-best-alpha0.5-epochs5-first-clips1-seed0"
    assert (
        name(method="fp32", budgets=(4.0,) * 20, alpha=1.0) == "cifar10-fp32-alpha1-epochs5-clients20-seed0"
    )


@pytest.mark.parametrize("name", list(TABLES))
def test_every_cell_of_a_table_has_a_name_of_its_own(name: str) -> None:
    names = [cell for cell, _ in named_cells(name)]
    assert len(set(names)) == len(names)


def test_tables_share_a_name_where_they_share_a_cell_and_nowhere_else() -> None:
    cells = [cell for table in TABLES for cell in named_cells(table)]
    names = {experiment: name for name, experiment in cells}
    assert len(set(names.values())) == len(names) < len(cells)


def named_cells(name: str) -> list[tuple[str, Experiment]]:
    """The table's cells at the paper's scale, with the rows that have to be asked for."""
    scale, data_set = SCALES["paper"], DATA_SETS[0]
    table, common = TABLES[name](data_set, (), scale.local_epochs), scale.experiment_settings(data_set)
    if "fp32" in (row.key for row in table.rows):
        table = replace(table, rows=table.rows + ON_REQUEST)
    made = [table.experiment(row, column, common, "x", 0) for row, column in table.cells()]
    return [(cell_name(data_set, experiment, scale.cut.rounds), experiment) for experiment in made]


# Ctrl-C

SCRIPT = """
import signal
import sys
from dataclasses import replace
from fedmpq.cli.main import main
from fedmpq.lab import paper_tables, scales
if __name__ == "__main__":
    # Whoever runs the tests in the background of a shell has them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    paper_tables.DATA_SETS = (replace(paper_tables.DATA_SETS[0], model="digits_cnn"),)
    cut = scales.Cut(80, 40, 500, 1)
    scales.SCALES["mid"] = scales.Scale("mid", cut, (1,), settings={"batch_size": 8})
    words = "--data digits --only fedmpq --alpha 1 --seeds 0 --out out --workers 1"
    sys.exit(main(["reproduce", "table1", *words.split()]))
"""


@pytest.mark.slow
def test_ctrl_c_keeps_finished_rounds_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "out/cells/cifar10-fedmpq-paper-alpha1-epochs1-seed0" / LOG_NAME
    deadline = time.monotonic() + 120
    # A round is in the checkpoint for certain once the next one is in the log.
    while not (log.exists() and log.read_text().count("\n") > 2):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # As a terminal does it: to the whole group.
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert (
        out.splitlines()[-1] == "stopped; every finished round is saved; the same command goes on from there"
    )
    while group_is_alive(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert load_checkpoint(log.parent).model.round >= 1


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
