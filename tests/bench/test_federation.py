import json
import math
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from bench import federation, flower, performance
from bench.federation import Case, Result
from bench.loopback import OwnRounds
from bench.rounds import Rounds, between, bytes_between
from tools.programs import ProgramError
from tools.tcp_proxy import Proxy

BYTES_PER_PAYLOAD = 1.03
"""What a client may send or get in a round, over planes, steps and side tensors."""


def invented(with_flower: bool = True) -> Result:
    """Three turns; the ratio of the medians over all rounds is 40, the median of the turns' ratios 30."""
    turns = (([0.1, 0.2, 0.3], 50.0), ([0.1] * 3, 60.0), ([0.1, 0.2, 0.3], 55.0))
    ours = [OwnRounds(seconds, [101, 103], [110, 110], [100, 100], peak) for seconds, peak in turns]
    theirs = [Rounds([seconds] * 3, [900] * 2, [1200] * 2) for seconds in (2.0, 4.0, 6.0)]
    case = Case(rounds=3, with_flower=with_flower)
    return Result(case, 1000, ours, theirs if with_flower else [], [0.5] * 3, [1.0] * 3)


def test_our_rounds_send_little_more_than_the_payload(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench.federation", "--rounds", "2", "--repetitions", "1", "--no-flower", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    federation.main()
    facts = json.loads(capsys.readouterr().out)
    assert facts["flwr_seconds_per_round"] is None
    assert facts["speedup_vs_flwr"] is None
    assert facts["seconds_per_round"] > 0
    assert 20 < facts["server_peak_mb"] < 1000
    assert facts["cores"] >= 1
    assert len(facts["load_average_before"]) == 3
    # Four bits for each of 270,000 weights, two or four bytes for each of 3,000 numbers beside them.
    assert 134_000 < facts["payload_bytes"] < 150_000
    # Entropy codes make less of them.
    for direction in ("bytes_up", "bytes_down"):
        assert 0.5 < facts[direction] / facts["payload_bytes"] <= BYTES_PER_PAYLOAD


def test_ratios_are_between_neighbouring_turns() -> None:
    facts = invented().as_dict()
    assert facts["seconds_per_round"] == 0.1
    assert facts["flwr_seconds_per_round"] == 4.0
    assert facts["speedup_vs_flwr"] == 30.0
    assert facts["spreads"]["speedup_vs_flwr"] == pytest.approx(
        {"median": 30.0, "least": 10.0, "greatest": 40.0}
    )
    assert facts["bytes_ratio_vs_flwr"] == pytest.approx(2100 / 212, abs=0.01)
    assert facts["bytes_up_per_payload"] == 1.02
    assert facts["server_peak_mb"] == 60.0


@pytest.mark.parametrize("with_flower", [True, False])
def test_tables_say_what_was_measured(with_flower: bool) -> None:
    facts = invented(with_flower).as_dict()
    text = federation.table(facts)
    assert ("30.0" in text.splitlines()[1]) is with_flower
    assert "x1.0200 up, x1.1000 down" in text
    page = performance.federation_table(facts)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert ("| 4.000 (2.000 to 6.000) | **30.0** |" in page) is with_flower
    assert "was not installed" in page or with_flower


def test_a_missing_flower_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(flower, "ROOT", tmp_path)
    monkeypatch.setattr(flower, "ENVIRONMENT", tmp_path / "flower")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert not federation._flower_is_there()
    assert "measured without Flower: flwr 1.39.0 cannot be installed" in capsys.readouterr().err
    assert not (tmp_path / "flower").exists()


def test_flowers_arrays_are_the_fp32_model() -> None:
    shapes = federation.fp32_shapes(Case())
    # ResNet-20: convolutions, shortcuts and the classifier; four numbers per channel of each BatchNorm.
    assert (16, 3, 3, 3) in shapes
    assert 270_000 < sum(math.prod(shape) for shape in shapes) < 276_000


def test_a_round_that_lacks_a_reply_is_an_error(tmp_path: Path) -> None:
    stamps = tmp_path / "stamps"
    assert flower._moments(stamps) == []
    stamps.write_text("10.5 2\n12.5 2\n14", encoding="ascii")
    assert flower._moments(stamps) == [10.5, 12.5]
    stamps.write_text("10.5 2\n12.5 1\n", encoding="ascii")
    with pytest.raises(ProgramError, match="round 2 of Flower merged 1 replies of 2"):
        flower._moments(stamps)


def test_bytes_are_counted_between_moments() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Proxy(server.getsockname()[1]) as proxy:
        with socket.create_connection(("127.0.0.1", proxy.port)) as board:
            inside, _ = server.accept()
            with inside:
                moments = [time.monotonic()]
                for up, down in ((100, 10_000), (3, 0), (0, 7)):
                    _exchange(board, inside, up)
                    _exchange(inside, board, down)
                    moments.append(time.monotonic())
        assert bytes_between(proxy, moments) == ([100, 3, 0], [10_000, 0, 7])
    assert all(seconds > 0 for seconds in between(moments))


def _exchange(sender: socket.socket, receiver: socket.socket, size: int) -> None:
    sending = threading.Thread(target=sender.sendall, args=(b"x" * size,))
    sending.start()
    left = size
    while left:
        left -= len(receiver.recv(left))
    sending.join()
