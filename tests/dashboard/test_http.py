"""The dashboard over real HTTP, beside an administration at a real socket, and over a simulation's folder."""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import uvicorn

from fedmpq.cli.main import main
from fedmpq.dashboard.guard import HEADERS
from fedmpq.dashboard.operator_token import operator_token
from fedmpq.dashboard.places import DashboardError
from fedmpq.dashboard.serving import dashboard_address, open_places, serve_folders, serving_beside
from fedmpq.lab.checkpoint import Checkpoint, save_checkpoint
from fedmpq.lab.experiment import Experiment
from fedmpq.lab.round_log import Accuracies, RoundResult, read_log, write_log
from fedmpq.method.history import ClientFacts
from fedmpq.method.state import ClientRecord, GlobalModel
from fedmpq.server.state_folder import StateFolder
from fedmpq.server.store.sql import open_store
from tests.cli.administered import RUN_ID, Administered, administered
from tests.server.small_model import GRAPH as SMALL
from tests.server.small_model import first_state
from tests.waiting import until

SECONDS = 60.0
GRAPH, MODEL = b"g" * 32, b"m" * 32


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def facts(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Asked:
    """A dashboard at `url`, asked by hand."""

    url: str
    token: str = ""

    def connect(self) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        host, port = address.hostname or "", address.port or 0
        if address.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=SECONDS)
        trusting = ssl.create_default_context()
        trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
        return http.client.HTTPSConnection(host, port, timeout=SECONDS, context=trusting)

    def get(self, path: str, **headers: str) -> Answer:
        return self._ask("GET", path, None, headers)

    def press(self, deed: str, request: Any, *, token: str | None = None) -> Answer:
        shown = {"Authorization": f"Bearer {self.token if token is None else token}"}
        return self._ask("POST", f"/api/operator/{deed}", json.dumps(request), shown)

    def _ask(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Answer:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, named, answer.read())
        finally:
            connection.close()

    @contextmanager
    def events(self) -> Iterator[Iterator[Any]]:
        """The states that come, one after the other."""
        connection = self.connect()
        connection.request("GET", "/api/events")
        answer = connection.getresponse()
        assert answer.getheader("content-type") == "text/event-stream; charset=utf-8"
        lines = (line.decode() for line in iter(answer.readline, b""))
        try:
            yield (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
        finally:
            connection.close()


@pytest.fixture
def state(tmp_path: Path) -> StateFolder:
    folder = StateFolder(tmp_path / "state")
    assert main(["server", "init", "--state", str(folder.path)]) == 0
    store = open_store(folder.database_url())
    try:
        store.queue_run("night", {"rounds": 20}, ["a", "b"], GRAPH, MODEL, 1_900_000_000.0)
    finally:
        store.close()
    return folder


@pytest.fixture
def server(state: StateFolder) -> Iterator[Administered]:
    with administered(state.path) as servicer:
        yield servicer


@pytest.fixture
def asked(server: Administered, state: StateFolder) -> Iterator[Asked]:
    with serving_beside(state, "0") as served:
        yield Asked(served.url, operator_token(state))


def test_the_page_and_the_facts_with_a_strict_policy(asked: Asked) -> None:
    for path, status in (("/", 200), ("/dashboard.js", 200), ("/api/state", 200), ("/nothing", 404)):
        answer = asked.get(path)
        assert answer.status == status, path
        assert answer.headers | {name.lower(): value for name, value in HEADERS.items()} == answer.headers
    assert asked.get("/api/state", Host="evil.example").status == 421
    assert asked.get("/api/state", Origin="http://evil.example").status == 403


def test_the_state_is_what_the_server_says(asked: Asked) -> None:
    facts = asked.get("/api/state").facts
    assert (facts["operates"], facts["closed"]) == (True, False)
    (place,) = facts["places"]
    assert (place["kind"], place["running"], place["note"]) == ("server", True, "")
    assert [board["name"] for board in place["boards"]] == ["camera-1", "camera-2"]
    assert [run["name"] for run in place["runs"]] == ["night"]


def test_an_event_comes_with_every_change(asked: Asked, server: Administered) -> None:
    with asked.events() as events:
        first = next(events)
        assert first["places"][0]["boards"][1]["connected"] is False
        server.status.clients[1].connected = True
        assert next(events)["places"][0]["boards"][1]["connected"] is True


@pytest.mark.parametrize("verb", ["pause", "resume", "abort"])
def test_a_button_does_what_the_command_does(
    asked: Asked, server: Administered, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "fedmpq.dashboard"):
        answer = asked.press(verb, {"run_id": RUN_ID})
    assert (answer.status, server.asked) == (200, [(verb, RUN_ID)])
    assert answer.facts["done"].startswith("night (01234567)")
    assert [record.getMessage() for record in caplog.records] == [f"the operator asks: {verb}"]


def test_no_button_works_without_the_token(asked: Asked, server: Administered) -> None:
    for token in ("", "fmo_" + "x" * 43, asked.token[:-1], asked.token.upper()):
        answer = asked.press("abort", {"run_id": RUN_ID}, token=token)
        assert (answer.status, answer.facts["error"]) == (401, "this needs the operator's token")
    assert server.asked == []


def test_a_run_is_started_from_its_text(asked: Asked, server: Administered) -> None:
    text = 'name = "new"\nrounds = 3'
    assert asked.press("start", {"config": text}).facts["done"].startswith("queued: new")
    assert server.asked == [("start", (text, str(Path.cwd())))]


@pytest.mark.parametrize(
    ("deed", "request_", "words"),
    [
        ("explode", {}, "there is no button 'explode'"),
        ("pause", {}, "run_id must be a text"),
        ("pause", {"run_id": 7}, "run_id must be a text"),
        ("start", {"config": "x" * 100_001}, "1 to 100000 characters"),
        ("bundle", {"name": "../up"}, "'../up'"),
        ("drop", {"name": "nobody"}, "there is no client 'nobody'"),
        ("pause", [], "a JSON object"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(asked: Asked, deed: str, request_: Any, words: str) -> None:
    answer = asked.press(deed, request_)
    assert answer.status == 400
    assert words in answer.facts["error"]
    assert asked.press("pause", {"config": "x" * 300_000}).status == 413


def test_a_bundle_is_made_and_a_board_dropped(asked: Asked, state: StateFolder) -> None:
    done = asked.press("bundle", {"name": "camera-9"}).facts["done"]
    folder = state.bundles / "camera-9"
    assert str(folder) in done
    assert {path.name for path in folder.iterdir()} == {"ca.pem", "client.pem", "client.key", "token"}
    assert asked.press("bundle", {"name": "camera-9"}).status == 400
    assert "camera-9 is dropped" in asked.press("drop", {"name": "camera-9"}).facts["done"]
    assert not folder.exists()


def test_a_server_that_stops_is_still_shown(state: StateFolder) -> None:
    with administered(state.path), serving_beside(state, "0") as served:
        asked = Asked(served.url)
        until(lambda: asked.get("/api/state").facts["places"][0]["running"])
    with serving_beside(state, "0") as served:
        (place,) = Asked(served.url).get("/api/state").facts["places"]
        assert (place["running"], place["runs"], place["note"]) == (False, [], "the server is starting")


def test_only_exported_models_can_be_had(asked: Asked, state: StateFolder) -> None:
    run_id = asked.get("/api/state").facts["places"][0]["runs"][0]["run_id"]
    folder = state.path / "exports" / f"{run_id}-3-onnx"
    folder.mkdir(parents=True)
    (folder / "camera-1.onnx").write_bytes(b"a model")
    (folder / "secret").write_bytes(b"not a model")
    card = {"sha256": "ab", "file_bytes": 7, "target": "onnx", "clients": [0], "accuracy": 0.5}
    (folder / "camera-1.onnx.json").write_text(json.dumps(card))
    path = f"/api/runs/0/{run_id}/models/{folder.name}"
    answer = asked.get(f"{path}/camera-1.onnx")
    assert (answer.status, answer.body) == (200, b"a model")
    assert 'filename="camera-1.onnx"' in answer.headers["content-disposition"]
    others = (
        "secret",
        "camera-1.onnx.json",
        "..%2f..%2foperator-token",
        "../../operator-token",
        "camera-2.onnx",
    )
    assert [asked.get(f"{path}/{name}").status for name in others] == [404] * len(others)
    assert asked.get(f"/api/runs/0/{run_id}/models/..%2f../operator-token").status == 404
    assert asked.get(f"/api/runs/0/{'0' * 32}").status == 404
    assert asked.get(f"/api/runs/7/{run_id}").status == 404


def test_beyond_loopback_it_takes_a_certificate_and_a_token(
    server: Administered, state: StateFolder, tmp_path: Path
) -> None:
    with serving_beside(state, "0.0.0.0:0") as served:
        assert served.url.startswith("https://")
        asked = Asked(served.url.replace("0.0.0.0", "127.0.0.1"), operator_token(state))
        assert asked.get("/").status == 200
        assert asked.get("/api/state").status == 401
        assert asked.get("/api/state", Authorization=f"Bearer {asked.token}").status == 200
    bare = StateFolder(tmp_path / "bare")
    with pytest.raises(DashboardError, match="there is no TLS; make a certificate: fedmpq server init"):
        serving_beside(bare, "0.0.0.0:0").__enter__()


def test_a_port_alone_is_loopbacks() -> None:
    assert dashboard_address("8480") == ("127.0.0.1", 8480)
    assert dashboard_address("[::]:1") == ("::", 1)


# A simulation's folder


def result(number: int, widths: int) -> RoundResult:
    parts = tuple(ClientFacts(i, f"client-{i}", "trained", "", (2 + i, 3, widths), 10, 20) for i in range(2))
    shares = Accuracies(0.5, {"2": 0.25 * number, "8": 0.5}, 0.375) if number != 2 else None
    return RoundResult(
        number, shares, 1 / number, 20, 40, (0, 1), (2, 3, widths), 0.5, {"training": 0.4}, parts
    )


@pytest.fixture
def simulated(tmp_path: Path) -> Path:
    """A folder as a simulation of three rounds leaves it; in the last one the weights had full precision."""
    folder = tmp_path / "garden"
    folder.mkdir()
    experiment = Experiment("digits", budgets=(2.0, 8.0), rounds=3)
    clients = (ClientRecord(0, 2.0, 11), ClientRecord(1, 8.0, 7))
    model = GlobalModel(3, *first_state(), (2, 3, 4), clients)
    save_checkpoint(folder, Checkpoint(experiment, SMALL, model, tuple("abcde")))
    write_log(folder, experiment, [result(1, 8), result(2, 7), result(3, 32)])
    return folder


@contextmanager
def shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    """`fedmpq dashboard` at work on the folder, in a thread: it would serve until Ctrl-C."""
    servers: list[Any] = []
    found: list[str] = []
    real = uvicorn.Server

    def made(config: Any) -> Any:
        servers.append(real(config))
        return servers[-1]

    monkeypatch.setattr(uvicorn, "Server", made)
    monkeypatch.setattr("builtins.print", lambda words, **_: found.append(words))
    thread = threading.Thread(target=serve_folders, args=([folder], "127.0.0.1:0"))
    thread.start()
    try:
        until(lambda: found and servers and servers[0].started)
        yield Asked(found[0].split()[-1])
    finally:
        servers[0].should_exit = True
        thread.join(SECONDS)


def test_a_simulation_tells_its_whole_history(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with shown(simulated, monkeypatch) as asked:
        state = asked.get("/api/state").facts
        (place,) = state["places"]
        assert (state["operates"], place["kind"], place["runs"][0]["state"]) == (
            False,
            "simulation",
            "finished",
        )
        assert asked.press("pause", {"run_id": "simulation"}).status == 403
        told = asked.get("/api/runs/0/simulation").facts
        later = asked.get("/api/runs/0/simulation?after=2").facts
    facts = [json.loads(json.dumps(result.facts().to_dict())) for result in read_log(simulated)]
    assert len(facts) == 3
    widths = [
        [one.pop("bit_widths") for one in (round_, *round_["clients"])]
        for rounds in (told["rounds"], facts)
        for round_ in rounds
    ]
    assert told["rounds"] == facts
    assert widths[:3] == [["238", "238", "338"], ["237", "237", "337"], ["", "", ""]]
    assert widths[3] == [[2, 3, 8], [2, 3, 8], [3, 3, 8]]
    assert [one["round"] for one in later["rounds"]] == [3]
    assert told["metric"] == {"key": "accuracy", "title": "accuracy", "is_share": True}
    assert told["layers"] == [
        {"name": "conv1", "weights": 54},
        {"name": "conv2", "weights": 216},
        {"name": "fc", "weights": 180},
    ]
    assert told["fp32_bytes"] == 4 * sum(
        map(np.size, [*first_state()[0].values(), *first_state()[1].values()])
    )


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DashboardError, match="no server's folder and no simulation's"):
        open_places([tmp_path])


def test_a_simulation_is_not_shown_beyond_this_machine(simulated: Path) -> None:
    with pytest.raises(DashboardError, match="ssh -L"):
        serve_folders([simulated], "0.0.0.0:0")
