"""Rollouts: which version of a model a board gets, and what the operator asks of versions.

A version is stored only after the exporter has made and verified all its files, with their hashes. What is
offered of it are files of these hashes alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedmpq.model.export_formats import FORMATS
from fedmpq.server.exports import ExportFailed, Exports, ModelFile
from fedmpq.server.store.errors import StoreError
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import ModelReport, Release, Run
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")

DEFAULT_FORMATS = ("onnx",)
ASK_AGAIN_SECONDS = 3600
LEAST_ASK_AGAIN_SECONDS = 10
REPORTS_IN_A_SOAK = 4
BY_OPERATOR = "taken back by the operator"
MAX_SOAK = 30 * 86400.0


class RolloutError(StoreError):
    """A rollout that cannot be."""


@dataclass(frozen=True)
class Offer:
    """The file that a client is to have; of a version, or of the run's newest model where it has none."""

    run: Run
    file: ModelFile
    release: Release | None


@dataclass(frozen=True)
class Plan:
    """How a version is rolled out."""

    canary: float
    max_errors: float
    soak: float

    def check(self) -> None:
        if not 0 < self.canary <= 1:
            raise RolloutError(f"a canary of {self.canary:.1%}: give a share above 0 % and up to 100 %")
        if not 0 <= self.max_errors < 1:
            raise RolloutError(
                f"a share of errors of {self.max_errors:.1%}: give one from 0 % to below 100 %"
            )
        if not 0 <= self.soak <= MAX_SOAK:
            raise RolloutError(f"{self.soak:g} s of soak: give seconds from 0 to {MAX_SOAK:g}")


class Rollouts:
    """The versions of a server's models."""

    def __init__(self, store: Store, exports: Exports, clock: Callable[[], float]) -> None:
        self._store = store
        self._exports = exports
        self._clock = clock

    async def start(self, run_id: str, number: int, plan: Plan, formats: Sequence[str]) -> Release:
        """A new version; raises StoreError, or ExportFailed if a file of it fails its verification."""
        plan.check()
        run = await asyncio.to_thread(self._store.run, run_id)
        if not run.ready:
            raise RolloutError(f"run {run.name!r} has no model to hand out yet; wait for its first rounds")
        number = number or run.ready
        own = tuple(run.config.get("export", ()))
        wanted = tuple(dict.fromkeys(formats or own or DEFAULT_FORMATS))
        # Only the run's settings name code to be loaded.
        if foreign := [each for each in wanted if each not in FORMATS and each not in own]:
            raise RolloutError(
                f"run {run.name!r} does not export to {foreign[0]!r}; take {', '.join(FORMATS)}, "
                f"or set it first: fedmpq runs set {run.name} export='[\"{foreign[0]}\"]'"
            )
        with self._exports.claimed(run, number):
            made = {each: await self._exports.make(run, each, number) for each in wanted}
            hashes = {each: [file.name.hex() for file in files] for each, files in made.items()}
            facts = (run_id, number, hashes, plan.canary, plan.max_errors, plan.soak, self._clock())
            release = await asyncio.to_thread(self._store.add_release, *facts)
        _tell(release, run.name)
        return release

    async def roll_back(self, run_id: str) -> Release:
        run = await asyncio.to_thread(self._store.run, run_id)
        release = await asyncio.to_thread(self._store.roll_back, run_id, BY_OPERATOR, self._clock())
        _tell(release, run.name)
        return release

    async def pin(self, name: str, version: int) -> None:
        """The board of that name stays at the version; 0: it is pinned no more."""
        known = await asyncio.to_thread(self._store.list_clients)
        client = next((each for each in known if each.name == name), None)
        if client is None:
            raise RolloutError(f"no board is called {name!r}; fedmpq status lists them")
        if version == 0:
            if not await asyncio.to_thread(self._store.unpin, client.client_id):
                raise RolloutError(f"board {name!r} is not pinned")
            say(log, "board unpinned", client=name)
            return
        release = await asyncio.to_thread(self._store.release, version)
        run = await asyncio.to_thread(self._store.run, release.run_id)
        for wanted in release.files:
            if not await self._exports.made(run, release.round, wanted):
                raise RolloutError(
                    f"the files of version {version} are gone; roll its model out anew: fedmpq rollout "
                    f"{run.name} --round {release.round}"
                )
        await asyncio.to_thread(self._store.pin, client.client_id, version)
        say(log, "board pinned", client=name, version=version)

    async def offer(self, client_id: str, wanted: str) -> Offer | None:
        """What the client is to have by its run's versions; None: none of its runs has any.

        Raises NoVersion or ExportFailed.
        """
        due = await asyncio.to_thread(self._store.release_for, client_id)
        if due is None:
            return None
        release, number = due
        run = await asyncio.to_thread(self._store.run, release.run_id)
        file = await self._file(run, release, number, wanted)
        await asyncio.to_thread(self._store.offer_release, client_id, release.version, wanted, self._clock())
        return Offer(run, file, release)

    async def _file(self, run: Run, release: Release, number: int, wanted: str) -> ModelFile:
        verified = release.files.get(wanted)
        if verified is None:
            raise ExportFailed(f"version {release.version} has {', '.join(release.files)} and no {wanted!r}")
        files = await self._exports.made(run, release.round, wanted)
        sound = [file for file in files if file.name.hex() in verified]
        if not sound:
            raise ExportFailed(
                f"the files of version {release.version} are gone, or not those it was made of"
            )
        file = next((file for file in sound if number in file.clients), None)
        if file is None:
            raise ExportFailed(f"version {release.version} was made before this client joined the run")
        return file

    async def report(self, client_id: str, report: ModelReport) -> None:
        """Raises UnknownRelease."""
        changed = await asyncio.to_thread(self._store.report_model, client_id, report, self._clock())
        if changed is not None:
            run = await asyncio.to_thread(self._store.run, changed.run_id)
            _tell(changed, run.name)


def ask_again_seconds(release: Release) -> int:
    """Often enough that the first boards report a few times while it soaks."""
    if release.state != "canary":
        return ASK_AGAIN_SECONDS
    seconds = round(release.soak / REPORTS_IN_A_SOAK)
    return max(LEAST_ASK_AGAIN_SECONDS, min(ASK_AGAIN_SECONDS, seconds))


def _tell(release: Release, run: str) -> None:
    level = logging.WARNING if release.state == "rolled_back" else logging.INFO
    words = {"canary": "version in its canary", "full": "version for all boards"}
    what = words.get(release.state, "version rolled back")
    facts = {"run": run, "version": release.version, "round": release.round, "reason": release.reason or None}
    say(log, what, level=level, **facts)
