"""What the operator asks of a run while the server conducts it: pause, resume, abort, other settings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedmpq.server.exports import check_export
from fedmpq.server.run_config import make_config
from fedmpq.server.run_settings import changed_config
from fedmpq.server.store.records import Run
from fedmpq.system.logs import say

if TYPE_CHECKING:
    from fedmpq.server.coordinator import Coordinator

log = logging.getLogger("fedmpq.server")


class RunControls:
    """Each is stored first, and then known to the coordinator."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._store = coordinator.store
        self.count = 0
        """How often a run was paused, resumed or aborted."""

    async def pause(self, run_id: str) -> Run:
        return self.changed(await asyncio.to_thread(self._store.pause_run, run_id))

    async def resume(self, run_id: str) -> Run:
        return self.changed(await asyncio.to_thread(self._store.resume_run, run_id))

    async def abort(self, run_id: str) -> Run:
        now = self._coordinator.clock()
        reason = "aborted by the operator"
        return self.changed(await asyncio.to_thread(self._store.abort_run, run_id, reason, now))

    async def configure(self, run_id: str, settings: str, defaults: Sequence[str]) -> Run:
        """Other operational settings for a run that exists; raises ConfigError or StoreError."""
        known = await asyncio.to_thread(self._store.run, run_id)
        config = changed_config(known, settings, defaults)
        if config.export != make_config(known.config).export:
            await check_export(config)
        run = await asyncio.to_thread(self._store.configure_run, run_id, known.config, config.to_dict())
        say(log, "run configured", run=run.name, settings=settings or None, defaults=list(defaults) or None)
        at_work = self._coordinator
        if at_work.active is not None and at_work.active.run.run_id == run_id:
            at_work.active.configured(run)
            at_work.connections.forget_descriptions()
            if at_work.round is not None:
                await at_work.round.configured()
        at_work.connections.changed.ring()
        return run

    def changed(self, run: Run) -> Run:
        """The store has changed the run's state; what is at work learns of it."""
        self.count += 1
        active = self._coordinator.active
        if active is not None and active.run.run_id == run.run_id:
            active.run = run
        say(log, f"run {run.state}", run=run.name, reason=run.reason or None)
        self._coordinator.connections.changed.ring()
        return run
