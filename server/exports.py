"""Model files for boards: made by `server.exporter` in a process of its own, kept in the state folder.

    exports/RUN_ID-ROUND-FORMAT/     NAME.onnx, NAME.onnx.json, ... one for each distinct model

A folder gets its name when everything in it is done. FORMAT is an export target's name, or `module:Class`.
Of each run the newest model's folders stay, those of earlier rounds that boards are at, and those of versions
that are rolled out.

Exporting needs torch, onnx and their runtimes; the server itself loads none of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmpq.model.export_formats import SUFFIXES
from fedmpq.server.blobs import Outgoing
from fedmpq.server.run_config import ConfigError, RunConfig
from fedmpq.server.store.records import Run
from fedmpq.system.durable_files import flush
from fedmpq.system.named_object import is_path

EXPORTER = "fedmpq.server.exporter"
KEPT_OFFERS = 8
_CARD = ".json"


class ExportFailed(RuntimeError):
    """The export process did not do it; the message is what it said."""


@dataclass(frozen=True)
class ModelFile:
    """A verified model and its card."""

    path: Path
    suffix: str
    card: str
    name: bytes
    """SHA-256, under which it is downloaded."""
    clients: tuple[int, ...]


class Exports:
    """The model files of a server's runs. One export at a time: it takes a core and much memory."""

    def __init__(self, state: Path, blobs: str) -> None:
        self._state = state
        self._blobs = blobs
        self._folder = state / "exports"
        self._turn = asyncio.Lock()
        self._claimed: defaultdict[str, Counter[int]] = defaultdict(Counter)

    def has(self, run: Run, wanted: str) -> bool:
        """Whether the files of the run's newest model in this format are made."""
        return self._folder_of(run, wanted).exists()

    def _folder_of(self, run: Run, wanted: str) -> Path:
        return self._folder_at(run, run.ready, wanted)

    def _folder_at(self, run: Run, number: int, wanted: str) -> Path:
        return self._folder / f"{run.run_id}-{number}-{wanted}"

    async def make(self, run: Run, wanted: str, number: int | None = None) -> list[ModelFile]:
        """The files of the run's newest model in this format, or of the model of round `number`, made now if
        they are not there yet."""
        number = run.ready if number is None else number
        folder = self._folder_at(run, number, wanted)
        async with self._turn:
            if not folder.exists():
                await self._export(run, number, wanted, folder)
        return await asyncio.to_thread(_read, folder)

    async def made(self, run: Run, number: int, wanted: str) -> list[ModelFile]:
        """Files that were made before; none if they are gone."""
        folder = self._folder_at(run, number, wanted)
        return await asyncio.to_thread(_read, folder)

    async def model_of(self, run: Run, client: int, wanted: str) -> ModelFile:
        """The client's own model."""
        files = await self.make(run, wanted)
        file = next((file for file in files if client in file.clients), None)
        if file is None:
            raise ExportFailed(f"the export of run {run.name!r} has no model for client {client}")
        return file

    async def tidy(self, run: Run, outgoing: Outgoing, released: Callable[[str], Collection[int]]) -> None:
        """Files of the run's earlier models go, but for those of the rounds that are `released`, those that
        are being downloaded, and the newest `KEPT_OFFERS` of those that were offered just now."""
        async with self._turn:
            await asyncio.to_thread(self._tidy, run, outgoing, released)

    def _tidy(self, run: Run, outgoing: Outgoing, released: Callable[[str], Collection[int]]) -> None:
        rounds = {path: round_of(path.name) for path in self._folder.glob(f"{run.run_id}-*-*")}
        kept = {run.ready, *self._claimed[run.run_id], *released(run.run_id)} if rounds else set()
        earlier = [path for path, number in rounds.items() if number < run.ready and number not in kept]
        offers = 0
        for folder in sorted(earlier, key=rounds.__getitem__, reverse=True):
            use = outgoing.use_of(folder)
            offers += use == "offered"
            if use == "read" or (use == "offered" and offers <= KEPT_OFFERS):
                continue
            outgoing.take_back(folder)
            # Under a name that says it is not whole, should this be interrupted.
            gone = folder.with_name(f".{folder.name}.old.partial")
            folder.replace(gone)
            shutil.rmtree(gone, ignore_errors=True)
        for left in self._folder.glob(f".{run.run_id}-*.partial"):
            shutil.rmtree(left, ignore_errors=True)

    @contextmanager
    def claimed(self, run: Run, number: int) -> Iterator[None]:
        """Files of this round stay while they are made into a version that is not stored yet."""
        self._claimed[run.run_id][number] += 1
        try:
            yield
        finally:
            self._claimed[run.run_id][number] -= 1
            self._claimed[run.run_id] += Counter()

    async def _export(self, run: Run, number: int, wanted: str, folder: Path) -> None:
        for left in self._folder.glob(f".{folder.name}.*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        # A name of its own: a killed server's export may still be writing to the one it was given.
        partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        await _exporter(
            *("make", "--state", str(self._state), "--run", run.run_id, "--blobs", self._blobs),
            *("--round", str(number), "--target", wanted, "--out", str(partial)),
        )
        partial.replace(folder)
        flush(folder.parent)


async def check_targets(wanted: Sequence[str]) -> None:
    """Raises `ExportFailed` if a target of the user's own cannot be loaded: not after the last round."""
    if own := [spec for spec in wanted if is_path(spec)]:
        await _exporter("check", *own)


async def _exporter(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", EXPORTER, *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise ExportFailed(lines[-1] if lines else f"the export ended with {process.returncode}")


def round_of(name: str) -> int:
    """Of RUN_ID-ROUND-FORMAT."""
    return int(name.split("-", 2)[1])


def _read(folder: Path) -> list[ModelFile]:
    found = []
    for card in sorted(folder.glob(f"*{_CARD}")):
        text = card.read_text(encoding="utf-8")
        facts: dict[str, Any] = json.loads(text)
        path = card.with_name(card.name.removesuffix(_CARD))
        # A card made before targets could be the user's own names none.
        suffix = facts["suffix"] if "suffix" in facts else SUFFIXES[facts["target"]]
        digest, clients = bytes.fromhex(facts["sha256"]), tuple(facts["clients"])
        found.append(ModelFile(path, suffix, text, digest, clients))
    return found


async def check_export(config: RunConfig) -> None:
    """Raises ConfigError if a format that the run asks for cannot be made here."""
    try:
        await check_targets(config.export)
    except ExportFailed as error:
        raise ConfigError(f"export = {list(config.export)}: {error}") from None
