import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from bench import fleet
from bench.confined import CannotConfine, confined
from bench.fleet import Case, FleetError
from bench.fleet_boards import CHANGED, Fleet, nudged
from bench.process_facts import ProcessFacts, parent_of
from fedmpq.exchange.messages import pack_layers
from fedmpq.exchange.wire import decode_update, digest, encode_model
from fedmpq.model import planes
from fedmpq.model.first_model import ImageFormat, make_first_model
from fedmpq.model.quantized import QuantizedLayer
from fedmpq.proto import federation_pb2 as pb
from tools.programs import wait_until


@pytest.mark.slow
def test_rounds_with_some_of_the_boards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench.fleet", "--boards", "5", "--selected", "3", "--rounds", "2", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    fleet.main()
    facts = json.loads(capsys.readouterr().out)
    assert (facts["boards"], facts["selected"], len(facts["seconds"])) == (5, 3, 2)
    assert facts["seconds_per_round"] > 0
    assert facts["cpu_ms_per_update"] > facts["cpu_ms_per_board"] > 0
    assert facts["calls_not_ok"] == {}
    assert facts["database_bytes"] > 10_000
    assert 20 < facts["base_mb"] < 1000
    # A payload has at least two bits for each of 18,000 weights.
    assert facts["payload_bytes_up"] > 2 * 3 * 4_500
    assert "an update" in fleet.table(facts)


def test_what_cannot_be_measured_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.fleet", "--boards", "5", "--selected", "6"])
    with pytest.raises(SystemExit):
        fleet.main()
    assert "--selected 6 is outside 1..5" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["bench.fleet", "--boards", "50", "--per-connection", "9"])
    with pytest.raises(SystemExit):
        fleet.main()
    assert "so 8 can share one" in capsys.readouterr().err
    monkeypatch.setattr(fleet, "allow_open_files", lambda _: 1024)
    with pytest.raises(FleetError, match="10000 boards need 10200 open files, this process may have 1024"):
        fleet.measure(Case(10_000, 1000))


@pytest.mark.parametrize("update", ["paper", "carried"])
def test_a_stand_in_changes_a_few_codes(update: str) -> None:
    image = ImageFormat(8, 8, 1, 1 / 64, 120)
    graph, weights, side = make_first_model("digits_cnn", 0, 10, image, activation_bits=4)
    layers = {name: QuantizedLayer.from_weights(one, 4, "max", False) for name, one in weights.items()}
    payload = encode_model(graph, pack_layers(layers), side)
    assignment = pb.Assignment(
        run_id="r" * 32, round=3, client=7, payload=digest(payload), plan=pb.TrainingPlan(update=update)
    )
    changed = nudged(graph, assignment, payload)
    for name, layer in pack_layers(layers).items():
        before = 0 if update == "carried" else planes.unpack(layer.planes, graph.weight_shape(name))
        codes = planes.unpack(changed.layers[name].planes, graph.weight_shape(name))
        moved = np.count_nonzero(codes != before)
        assert 1 <= moved <= CHANGED
    boards = Fleet(server_pids=[0])
    for client in (7, 8):
        assignment.client = client
        run_id, sent = decode_update(graph, boards.answer(graph, assignment, payload))
        assert (run_id, sent.client, sent.round) == ("r" * 32, client, 3)


def test_front_ends_go_with_a_database(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.fleet", "--fronts", "2"])
    with pytest.raises(SystemExit):
        fleet.main()
    assert "goes with --database postgresql://" in capsys.readouterr().err


def test_children_count_with_their_parent() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert parent_of(child.pid) == os.getpid()
        # It has no memory of its own until its program is there.
        wait_until(lambda: ProcessFacts.of(child.pid).resident_bytes > 0, "the child", [], 60)
        family, alone = ProcessFacts.of_family(os.getpid()), ProcessFacts.of(os.getpid())
        assert family.resident_bytes > alone.resident_bytes
        child.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups")
def test_a_confined_process_uses_its_share_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            with confined("test", busy.pid, 0.1):
                # What it does from its start on, imports included, is within the share or before this moment.
                before, began = ProcessFacts.of(busy.pid).cpu_seconds, time.monotonic()
                time.sleep(0.5)
                used = ProcessFacts.of(busy.pid).cpu_seconds - before
                assert used < 0.3 * (time.monotonic() - began)
        except CannotConfine as error:
            pytest.skip(str(error))
        finally:
            busy.kill()


def test_what_a_process_has_used_is_read() -> None:
    facts = ProcessFacts.of(os.getpid())
    assert facts.cpu_seconds == pytest.approx(sum(os.times()[:2]), abs=1.0)
    assert 10e6 < facts.resident_bytes < 100e9
