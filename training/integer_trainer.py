"""Local training of integer codes without a network: what a simulation runs in place of a board."""

from __future__ import annotations

from fedmpq.data.dataset import Dataset
from fedmpq.exchange.messages import Assignment, Calibration, Update
from fedmpq.model.graph import Graph
from fedmpq.training.engine import make_engine
from fedmpq.training.local_calibration import run_calibration
from fedmpq.training.local_round import run_local_round


class IntegerTrainer:
    """The board's own local round and calibration, on one thread."""

    def __init__(self, graph: Graph, engine: str) -> None:
        self._graph = graph
        # One for all clients: it keeps its memory, and each loads it anew. No board's memory is scarce here.
        self._engine = make_engine(engine, threads=1, ample=True)

    def train(self, assignment: Assignment, data: Dataset) -> Update:
        return run_local_round(self._engine, self._graph, assignment, data)

    def measure(self, assignment: Assignment, data: Dataset) -> Calibration:
        return run_calibration(self._graph, assignment, data)
