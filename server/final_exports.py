"""The model files that a run asks for when it has finished."""

from __future__ import annotations

import logging

from fedmpq.server.exports import ExportFailed, Exports
from fedmpq.server.resources import Resources
from fedmpq.server.store.records import Run
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")


class FinalExports:
    def __init__(self, resources: Resources, exports: Exports) -> None:
        self._resources = resources
        self._exports = exports

    async def make(self, run: Run) -> None:
        """Those that are not there yet. The run is finished without them too, so a failure is only told."""
        wanted = run.config.get("export", ()) if run.state == "finished" else ()
        if all(self._exports.has(run, each) for each in wanted):
            return
        self._resources.waiting_for = "the export"
        try:
            made = [await self._exports.make(run, each) for each in wanted]
        except (ExportFailed, OSError) as error:
            say(log, "no model files", level=logging.ERROR, run=run.name, error=str(error))
        else:
            say(log, "model files made", run=run.name, files=sum(map(len, made)))
