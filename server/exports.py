"""Model files for boards: made by `fedmpq export` in a process of its own, kept in the state folder.

    exports/RUN_ID-ROUND/     NAME.onnx, NAME.onnx.json, ... one for each distinct assignment

Exporting needs torch, onnx and their runtimes; the server itself loads none of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpq.server.blobs import file_digest
from fedmpq.server.store import Run

_FEDMPQ = (sys.executable, "-c", "from fedmpq.cli.main import main; raise SystemExit(main())")
_CARD = ".json"
_SUFFIXES = {"onnx": ".onnx", "executorch": ".pte.xz"}


class ExportFailed(RuntimeError):
    """The export process did not do it; the message is what it said."""


@dataclass(frozen=True)
class ModelFile:
    """A verified model and its card."""

    path: Path
    card: str
    clients: tuple[int, ...]
    format: str

    @property
    def suffix(self) -> str:
        return _SUFFIXES[self.format]

    def digest(self) -> bytes:
        """SHA-256: the name under which it is downloaded."""
        return file_digest(self.path)


class Exports:
    """The model files of a server's runs. One export at a time: it takes a core and much memory."""

    def __init__(self, state: Path, blobs: str) -> None:
        self._state = state
        self._blobs = blobs
        self._folder = state / "exports"
        self._turn = asyncio.Lock()

    async def make(self, run: Run, formats: Sequence[str]) -> list[ModelFile]:
        """The files of the run's newest model in these formats, those that are not there yet made now."""
        folder = self._folder / f"{run.run_id}-{run.round}"
        async with self._turn:
            missing = [one for one in formats if not self._read(folder, one)]
            if missing:
                await self._export(run, missing, folder)
            return [file for one in formats for file in self._read(folder, one)]

    async def model_of(self, run: Run, client: int, wanted: str) -> ModelFile:
        """The client's own model."""
        files = await self.make(run, [wanted])
        file = next((file for file in files if client in file.clients), None)
        if file is None:
            raise ExportFailed(f"the export of run {run.name!r} has no model for client {client}")
        return file

    async def _export(self, run: Run, formats: Sequence[str], folder: Path) -> None:
        process = await asyncio.create_subprocess_exec(
            *_FEDMPQ,
            *("export", "--run", str(self._state), "--run-name", run.run_id, "--blobs", self._blobs),
            *("--all", "--format", ",".join(formats), "--no-speed", "--json", "-o", str(folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        if process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise ExportFailed(lines[-1] if lines else f"the export ended with {process.returncode}")

    @staticmethod
    def _read(folder: Path, wanted: str) -> list[ModelFile]:
        """The files whose cards are there: a card is written when its file has passed."""
        found = []
        for card in sorted(folder.glob(f"*{_CARD}")):
            text = card.read_text(encoding="utf-8")
            facts: dict[str, Any] = json.loads(text)
            if facts["target"] == wanted:
                path = card.with_name(card.name.removesuffix(_CARD))
                found.append(ModelFile(path, text, tuple(facts["clients"]), wanted))
        return found
