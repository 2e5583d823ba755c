from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import pytest
import torch

from bench import simulation, simulation_rivals
from bench.process_facts import marked_cpu_seconds
from bench.simulation import BEGIN, END, OURS, PAGE, Case, Result
from bench.simulation_rivals import PROGRAMS, Rival, RivalError
from fedmpq.model import zoo
from tools.programs import wait_until

LITTLE = Case(model="digits_cnn", clients=2, samples=16, batch=8, rounds=1, repetitions=1, workers=1)


def invented() -> Result:
    """Two turns: the ratios of neighbours are 3 and 5, and that of the medians is 4.33."""
    seconds = {OURS: [1.0, 2.0], "flwr": [3.0, 10.0]}
    cpu = {OURS: [2.0, 2.0], "flwr": [4.0, 8.0]}
    case = Case(clients=10, epochs=2, repetitions=2)
    return Result(case, seconds, cpu, {"pfl": "gone"}, [0.5] * 3, [1.5] * 3)


@pytest.mark.slow
def test_our_rounds_are_measured() -> None:
    facts = simulation.measure(LITTLE, with_ray=False, with_rivals=False).as_dict()
    assert facts["client_epochs_per_second"].keys() == {OURS}
    assert facts["client_epochs_per_second"][OURS] > 0
    assert facts["speedup_vs"] == {}
    assert facts["cpu_seconds_per_client_epoch"][OURS]["median"] > 0


def test_ratios_are_between_neighbouring_turns() -> None:
    facts = invented().as_dict()
    assert facts["speedup_vs"] == {"flwr": 4.0}
    assert facts["client_epochs_per_second"] == {OURS: 15.0, "flwr": pytest.approx(4.33, abs=0.01)}
    assert facts["speedup_spreads"]["flwr"] == {"median": 4.0, "least": 3.0, "greatest": 5.0}
    assert facts["cpu_ratios"]["flwr"] == {"median": 3.0, "least": 2.0, "greatest": 4.0}
    assert facts["cpu_seconds_per_client_epoch"]["flwr"]["median"] == pytest.approx(0.3)


def test_tables_say_what_was_measured() -> None:
    facts = invented().as_dict()
    rows = simulation.table(facts).splitlines()
    assert len({row.count("|") for row in rows}) == 1
    measured = "4.3 (2.0 to 6.7) | **4.0** (3.0 to 5.0) | 300 (200 to 400) | **3.0** (2.0 to 4.0)"
    assert rows[3] == f"| Flower on Ray 1.41.0 | {measured} |"
    assert rows[4] == "| pfl-research 0.6.0 | not measured: gone | | | |"
    assert "10 clients of 256 images" in simulation.words(facts)
    page = PAGE.read_text(encoding="utf-8")
    assert page.index(BEGIN) < page.index(END)


def test_processor_time_is_counted_of_daemons_too() -> None:
    """Of a process that is nobody's child any more, by what it has in its environment."""
    name, value = "FEDMPQ_BENCH_TURN", uuid4().hex
    assert marked_cpu_seconds(f"{name}={value}") == 0
    busy = "import time\nwhile time.process_time() < 0.3: pass\ntime.sleep(600)"
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"
    parent = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {busy!r}], {quiet}).pid)"
    marked = {**os.environ, name: value}
    done = subprocess.run([sys.executable, "-c", parent], env=marked, stdout=subprocess.PIPE, check=True)
    try:
        wait_until(lambda: marked_cpu_seconds(f"{name}={value}") >= 0.25, "the daemon's time", [])
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


def rival_network() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rival_network", PROGRAMS / "network.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("model", simulation.IMAGES)
def test_rivals_train_the_same_network(model: str) -> None:
    height, width, channels = simulation.IMAGES[model]
    ours = zoo.build(model, classes=10, channels=channels)
    theirs = rival_network().Residual(model, channels, 10)
    theirs.load_state_dict(ours.state_dict())
    images = torch.rand(4, channels, height, width)
    assert torch.equal(theirs(images), ours(images))


def test_a_rival_that_cannot_be_had_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(simulation_rivals, "ROOT", tmp_path)
    monkeypatch.setattr(simulation_rivals, "ENVIRONMENTS", tmp_path / "rivals")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    ready, missing = simulation._ready(LITTLE)
    assert ready == {}
    assert missing["pfl"] == "pfl==0.6.0 cannot be installed: it said nothing"
    assert "measured without Flower: flwr[simulation]==1.41.0 cannot be" in capsys.readouterr().err


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_rival_that_fails_or_loses_a_round_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rounds: int
) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "two.py").write_text(
        "import json, pathlib, sys\n"
        "folder = json.loads(pathlib.Path(sys.argv[1]).read_text())['folder']\n"
        "pathlib.Path(folder, 'stamps').write_text('1.5\\n2.5\\n')\n"
    )
    monkeypatch.setattr(simulation_rivals, "PROGRAMS", tmp_path / "programs")
    monkeypatch.setattr(Rival, "installed", lambda _: Path(sys.executable))
    rival = Rival("Two", "two==2", "two")
    if rounds == 2:
        assert [each.seconds for each in rival.moments({"rounds": 2}, tmp_path)] == [1.5, 2.5]
        return
    with pytest.raises(RivalError, match="Two ended with 0 after 2 of 3 rounds"):
        rival.moments({"rounds": 3}, tmp_path)
