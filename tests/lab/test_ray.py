"""A simulation on Ray ends as one in processes does, to the bit, whatever happens to its workers."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import fedmpq
from fedmpq.exchange.float_messages import FloatAssignment, FloatUpdate
from fedmpq.exchange.messages import Assignment, Update
from fedmpq.lab import ray_cluster, ray_pool, simulation
from fedmpq.lab.checkpoint import load_checkpoint
from fedmpq.lab.experiment import Experiment, ExperimentError, make_experiment
from fedmpq.lab.pool import WorkerError
from fedmpq.lab.ray_pool import RayPool
from fedmpq.lab.round_log import read_log
from fedmpq.lab.simulation import Progress, prepare, run
from fedmpq.method.archive import Tensors
from fedmpq.method.registry import float_method, integer_method
from fedmpq.model.randomness import Draws
from fedmpq.training.engine import TrainingError
from tests.in_process import InProcessPool
from tests.lab import small_experiment
from tests.lab.small_experiment import silent
from tests.waiting import until
from tools.programs import Program, free_ports, listens, wait_until

MARK = "FEDMPQ_TEST_RAY"
"""In the environment of the processes of a cluster, by which they are found."""
LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")
"""127.0.0.1, the same in IPv6, and ::1, as Linux writes them."""
WANTED = "FEDMPQ_RAY_TESTS"
on_a_cluster = pytest.mark.skipif(
    not os.environ.get(WANTED), reason=f"clusters of Ray are started where {WANTED}=1 is set"
)
"""They take a minute on two idle cores and several on busy ones: at a load of 8, a cluster took 26 s to start
before anything of this project's ran, and at loads of 5 to 10 the test that loses workers took 46 to 103 s.
There Ray's head was seen not to start what serves a client, which is tried again after
RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S, and a client was seen to give up connecting. What the pool does
when workers that sum are lost is tested without Ray in `test_ray_sums.py`, always."""
SMALL = {**small_experiment.SMALL, "participation": 1.0}


def small(**changes: object) -> Experiment:
    return make_experiment({**SMALL, **changes})


def processes(mark: str, title: str = "") -> list[int]:
    """Of a cluster, those whose title begins so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            marked = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if marked and (folder / "cmdline").read_bytes().decode().startswith(title):
                found.append(int(folder.name))
    return found


def listening(process: int) -> set[str]:
    """The addresses at which a process listens, as Linux writes them."""
    sockets = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            sockets.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}


def assert_same_run(one: Path, other: Path) -> None:
    mine, yours = load_checkpoint(one), load_checkpoint(other)
    assert mine.model.clients == yours.model.clients
    tensors, expected = (Tensors.of(each.model).to_arrays() for each in (mine, yours))
    assert {name: each.tobytes() for name, each in tensors.items()} == {
        name: each.tobytes() for name, each in expected.items()
    }
    logs = [[replace(row, seconds=0.0, phases={}) for row in read_log(folder)] for folder in (one, other)]
    assert logs[0] == logs[1]


def run_in_process(folder: Path, experiment: Experiment) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "WorkerPool", InProcessPool)
        run(prepare(experiment), folder, 1, silent)
    return folder


@on_a_cluster
@pytest.mark.slow
@pytest.mark.parametrize("aggregation", ["agreement", "mean"])
def test_a_worker_killed_in_every_round_changes_nothing(
    aggregation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a cluster of its own, which nobody else can reach and of which nothing is left. Under a mean workers
    sum what their clients have changed, and with a worker its sum is lost."""
    monkeypatch.setattr(ray_pool, "SUMMED_FROM", 1)
    experiment = small(aggregation=aggregation)
    expected = run_in_process(tmp_path / "in-process", experiment)
    mark, killed, addresses = secrets.token_hex(8), [], set[str]()
    monkeypatch.setenv(MARK, mark)

    def kill(progress: Progress) -> None:
        if progress.result is None and progress.done == 1:
            for process in processes(mark):
                addresses.update(listening(process))
            killed.append(until(lambda: processes(mark, "ray::RayWorker"))[0])
            os.kill(killed[-1], signal.SIGKILL)

    run(prepare(experiment), tmp_path / "ray", 2, kill, on="ray")
    assert len(set(killed)) == 2
    assert addresses
    assert addresses <= set(LOOPBACK)
    assert_same_run(tmp_path / "ray", expected)
    until(lambda: not [each for each in processes(mark) if each != os.getpid()])
    assert "RAY_AUTH_TOKEN" not in os.environ
    # Who reads the output as JSON need not know of Ray.
    assert capfd.readouterr() == ("", "")


@contextmanager
def head(mark: str) -> Iterator[str]:
    """The address of a cluster that was there before, for clients of Ray."""
    (port,) = free_ports(1)
    # Sockets of Ray lie in its folder, and their paths must be short.
    with TemporaryDirectory(prefix="ray-") as folder:
        words = f"--head --block --port 0 --num-cpus 2 --ray-client-server-port {port} --temp-dir {folder}"
        environment = {MARK: mark, "RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        # A busy machine takes more than the usual half a minute to start what serves a client, and was seen
        # never to do: then the next attempt of whoever joins should come soon.
        environment |= {"RAY_AUTH_MODE": "disabled", "RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "90"}
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *words.split()]
        command += ["--node-ip-address", "127.0.0.1", "--include-dashboard", "false"]
        with Program(command, Path(folder) / "head.log", environment) as program:
            wait_until(lambda: listens(port), "Ray's head", [program])
            yield f"ray://127.0.0.1:{port}"
        until(lambda: not processes(mark))


@pytest.fixture(scope="module")
def mark() -> str:
    return secrets.token_hex(8)


@pytest.fixture(scope="module")
def cluster(mark: str) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        with head(mark) as address:
            yield address


@on_a_cluster
@pytest.mark.slow
def test_a_cluster_elsewhere_gives_the_same_through_the_front_door(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a client of Ray, whose references are others than those of a program on the cluster."""
    monkeypatch.setattr(ray_pool, "SUMMED_FROM", 1)
    mean = {**SMALL, "aggregation": "mean"}
    settings = {name: value for name, value in mean.items() if name not in ("model", "data")}
    fedmpq.simulate("digits_cnn", "digits", on=cluster, folder=tmp_path / "ray", progress=False, **settings)
    assert_same_run(tmp_path / "ray", run_in_process(tmp_path / "in-process", small(aggregation="mean")))


@on_a_cluster
@pytest.mark.slow
def test_tasks_on_a_cluster(cluster: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pool, for that takes seconds to start: payloads are shared, errors come through, and a task by
    which workers are lost again and again is an error itself."""
    prepared = prepare(small(method="fp32"))
    experiment, start = prepared.experiment, prepared.start
    given = experiment, start.graph, prepared.train, prepared.test
    floats = float_method(experiment, start.graph)
    codes = integer_method(small(), start.graph)
    pool: RayPool[Assignment | FloatAssignment, Update | FloatUpdate]
    pool = RayPool(*given, prepared.parts, 1, on=cluster)
    with closing(pool):
        assignments = [floats.assign(start.model, client) for client in start.model.clients]
        tasks = pool._client_tasks("train", [codes.assign(start.model, one) for one in start.model.clients])
        assert len({task.arguments[0] for task in tasks}) == 3  # one for each budget
        assert len({task.arguments[0] for task in pool._client_tasks("train", assignments)}) == 1
        with closing(InProcessPool(*given, prepared.parts)) as here:
            assert changes(pool.train(assignments)) == changes(here.train(assignments))
        wild = replace(assignments[2], plan=replace(assignments[2].plan, learning_rate=1e30, epochs=3))
        with pytest.raises(TrainingError, match=r"client 2, round 1"):
            list(pool.train([wild, assignments[0]]))
        # Nothing is left of what was broken off.
        assert [update.client for update in pool.train(assignments[3:])] == [3]
        endless = replace(assignments[1], plan=replace(assignments[1].plan, epochs=1_000_000))
        monkeypatch.setattr(ray_pool, "LOSSES", 2)
        with killing(mark), pytest.raises(WorkerError, match=r"lost with client 1.*--workers"):
            list(pool.train([endless]))


def changes(updates: Iterator[Update | FloatUpdate]) -> dict[tuple[int, str], bytes]:
    """What clients changed, by client and layer."""
    found: dict[tuple[int, str], bytes] = {}
    for update in updates:
        assert isinstance(update, FloatUpdate)
        decoded = update.changes.decoded(Draws(0, update.client, update.round))
        found |= {(update.client, name): each.tobytes() for name, each in decoded.items()}
    return found


@contextmanager
def killing(mark: str) -> Iterator[None]:
    """Every worker of the cluster as soon as it trains."""
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.05):
            for process in processes(mark, "ray::RayWorker.train"):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Busy:
    """In place of Ray: a cluster that fails to serve a client so many times, and then says something else."""

    def __init__(self, failures: int, said: str | None = None) -> None:
        self.failures, self.said, self.joins = failures, said, 0

    def init(self, address: str, **options: object) -> Busy:
        self.joins += 1
        if self.joins <= self.failures:
            raise RuntimeError(f"Initialization failure from server:\nStarting failed at {address}")
        if self.said is not None:
            raise ConnectionError(self.said)
        return self


def test_a_head_that_serves_a_client_late_is_asked_again() -> None:
    busy = Busy(ray_cluster.JOINS - 1)
    assert ray_cluster._connected(busy, "ray://head:1") is busy
    assert busy.joins == ray_cluster.JOINS


@pytest.mark.parametrize(
    ("busy", "joins"), [(Busy(99), ray_cluster.JOINS), (Busy(0, "nobody there"), 1)], ids=["late", "gone"]
)
def test_a_cluster_that_cannot_be_joined_is_an_error(busy: Busy, joins: int) -> None:
    with pytest.raises(WorkerError, match=r"no Ray cluster at ray://head:1.*(at ray://head:1|nobody there)"):
        ray_cluster._connected(busy, "ray://head:1")
    assert busy.joins == joins


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(WorkerError, match=r'pip install "fedmpq\[ray\]"'):
        run(prepare(small()), tmp_path, 1, silent, on="ray")


@pytest.mark.parametrize("on", ["cloud", "ray://", ""])
def test_a_place_that_is_none_is_named(tmp_path: Path, on: str) -> None:
    with pytest.raises(ExperimentError, match="none of processes, ray and ray://HOST:PORT"):
        run(prepare(small()), tmp_path, 1, silent, on=on)
    assert not list(tmp_path.iterdir())
