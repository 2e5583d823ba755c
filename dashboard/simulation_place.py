"""A simulation's folder: its log, which grows by a line a round, and its checkpoint."""

from __future__ import annotations

from pathlib import Path

from fedmpq.dashboard.model_files import checked_file, models_in
from fedmpq.dashboard.places import Facts, NotThere, graph_facts, moment_text, rounds_facts
from fedmpq.lab.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from fedmpq.lab.round_log import LOG_NAME, RoundResult, client_name, read_log

RUN_ID = "simulation"
"""A simulation's folder has one run."""
MODELS = "models"
"""The folder in it where its exported models are looked for: `fedmpq export --run RUN -o RUN/models`."""


class SimulationPlace:
    def __init__(self, key: str, folder: Path) -> None:
        self.key = key
        self._folder = folder
        self._read: tuple[tuple[int, int], list[RoundResult]] | None = None
        self._checkpoint: Checkpoint | None = None

    @staticmethod
    def is_one(folder: Path) -> bool:
        """Whether a simulation has begun there."""
        return (folder / LOG_NAME).is_file()

    def look(self) -> Facts:
        results, note = self._results(), ""
        try:
            rounds, budgets = self._begun().experiment.rounds, self._begun().experiment.budgets
        except CheckpointError as error:
            rounds, budgets, note = 0, (), str(error)
        done = results[-1].round if results else 0
        run = {
            "run_id": RUN_ID,
            "name": self._folder.resolve().name,
            # Its folder does not say whether a process is at work.
            "state": "finished" if rounds and done >= rounds else "not finished",
            "reason": "",
            "round": done,
            "rounds": rounds,
            "created": None,
            "ended": moment_text(self._changed()[0] / 1e9),
            "live": None,
            "exports": len(models_in(self._folder / MODELS, MODELS, {})),
        }
        boards = [{"name": client_name(i), "client": i, "budget": bits} for i, bits in enumerate(budgets)]
        return {
            "key": self.key,
            "kind": "simulation",
            "path": str(self._folder),
            "running": False,
            "note": note,
            "disk": None,
            "runs": [run],
            "boards": boards,
        }

    def told(self, run_id: str, after: int) -> Facts:
        self._check(run_id)
        results = self._results()
        names = {number: client_name(number) for number in range(len(self._begun().experiment.budgets))}
        return {
            "round": results[-1].round if results else 0,
            "rounds": rounds_facts(result.facts() for result in results if result.round > after),
            "models": models_in(self._folder / MODELS, MODELS, names),
            **graph_facts(self._begun().graph),
        }

    def model_file(self, run_id: str, folder: str, name: str) -> Path:
        self._check(run_id)
        if folder != MODELS:
            raise NotThere(f"there is no folder {folder!r}")
        return checked_file(self._folder / MODELS, name)

    def _check(self, run_id: str) -> None:
        if run_id != RUN_ID:
            raise NotThere(f"there is no run {run_id!r}")

    def _changed(self) -> tuple[int, int]:
        """When the log was last written, in nanoseconds since 1970, and its size."""
        facts = (self._folder / LOG_NAME).stat()
        return facts.st_mtime_ns, facts.st_size

    def _results(self) -> list[RoundResult]:
        """The log, read again when it has changed."""
        changed = self._changed()
        if self._read is None or self._read[0] != changed:
            self._read = changed, read_log(self._folder)
        return self._read[1]

    def _begun(self) -> Checkpoint:
        """What does not change while the simulation goes on: its experiment and its graph."""
        if self._checkpoint is None:
            self._checkpoint = load_checkpoint(self._folder)
        return self._checkpoint
