"""Prometheus metrics over HTTP on a loopback port; read from the coordinator when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedmpq.method.history import PHASES
from fedmpq.server.active_run import ActiveRun
from fedmpq.server.coordinator import Coordinator

LOOPBACK = "127.0.0.1"


class MetricsError(ValueError):
    """A port that cannot be listened on."""


class ServerMetrics(Collector):
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterable[Metric]:
        tally = self._coordinator.tally
        for name, value, what in (
            ("rounds", tally.rounds, "rounds merged"),
            ("calibrations", tally.calibrations, "calibrations merged"),
            ("round_seconds", tally.round_seconds, "seconds spent in merged rounds"),
            ("updates", tally.updates, "updates accepted"),
            ("updates_rejected", tally.rejected, "updates rejected"),
            ("clients_cut", tally.cut, "clients cut from a round"),
            ("rounds_extended", tally.extended, "deadlines that passed without a quorum"),
            ("upload_bytes", tally.bytes_up, "payload bytes of merged updates"),
            ("download_bytes", tally.bytes_down, "payload bytes of merged rounds' assignments"),
        ):
            yield CounterMetricFamily(f"fedmpq_{name}", f"Since the server started: {what}.", value=value)
        phases = CounterMetricFamily(
            "fedmpq_phase_seconds",
            "Since the server started: where merged rounds' time went.",
            labels=["phase"],
        )
        for phase in PHASES:
            phases.add_metric([phase], tally.phase_seconds[phase])
        yield phases
        connected = len(self._coordinator.connections)
        yield GaugeMetricFamily("fedmpq_clients_connected", "Clients with an open stream.", value=connected)
        yield self._boards()
        yield from self._run()

    def _boards(self) -> Metric:
        """Of all that were here since the server started."""
        family = GaugeMetricFamily(
            "fedmpq_board_away_seconds",
            "Since its stream was last open; 0: it is open now.",
            labels=["board"],
        )
        for name, seconds in self._coordinator.connections.ages():
            family.add_metric([name], seconds)
        return family

    def _run(self) -> Iterable[Metric]:
        active, current = self._coordinator.active, self._coordinator.round
        if active is None:
            return
        gauges = [("round", active.model.round, "The last round merged of the run at work.")]
        if current is not None:
            counts = current.counts()
            gauges += [
                ("round_selected", counts["selected"], "Clients selected for the open round."),
                ("round_updates", counts["updates"], "Updates it has."),
            ]
        for name, value, what in gauges:
            family = GaugeMetricFamily(f"fedmpq_{name}", what, labels=["run"])
            family.add_metric([active.run.name], value)
            yield family
        yield from _measured(active)


def _measured(active: ActiveRun) -> Iterable[Metric]:
    """What was last measured of the run; what never was is left out."""
    run, known = active.run.name, active.last_metrics
    for name, key, what in (
        ("loss", "loss", "Mean training loss of the last merged round."),
        (
            "score",
            "mean_deployed_accuracy",
            "Mean score of what boards run; of classes an accuracy.",
        ),
    ):
        if key in known:
            family = GaugeMetricFamily(f"fedmpq_{name}", what, labels=["run"])
            family.add_metric([run], known[key])
            yield family
    budgets = GaugeMetricFamily(
        "fedmpq_budget_score", "The same for each budget of bits per weight.", labels=["run", "budget"]
    )
    for budget, score in known.get("deployed_accuracy", {}).items():
        budgets.add_metric([run, budget], score)
    if budgets.samples:
        yield budgets


def serve_metrics(coordinator: Coordinator, port: int) -> tuple[int, Callable[[], None]]:
    """Serve on this port of loopback, or on a free one if it is 0; the port, and how to stop."""
    registry = CollectorRegistry()
    registry.register(ServerMetrics(coordinator))
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, addr=LOOPBACK, registry=registry)
    except OSError as error:
        raise MetricsError(f"cannot serve metrics on {LOOPBACK}:{port}: {error.strerror}") from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop
