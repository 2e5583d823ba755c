"""Runs that wait for their turn."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from fedmpq.model.graph import Graph
from fedmpq.server.blobs import Blobs
from fedmpq.server.exports import check_export
from fedmpq.server.first_model_process import first_model
from fedmpq.server.roles import require_rounds
from fedmpq.server.run_config import (
    ConfigError,
    RunConfig,
    difference,
    images_of,
    load_calibration_data,
    load_test_data,
    make_config,
)
from fedmpq.server.run_settings import OPERATIONAL, other_operation
from fedmpq.server.served_method import served_method
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Run
from fedmpq.system.logs import say

log = logging.getLogger("fedmpq.server")


class RunQueue:
    """Where runs come from: a config's name is a run's name, and the same config again is the same run."""

    def __init__(self, store: Store, blobs: Blobs, wake: Callable[[], None], *, alone: bool = True) -> None:
        """`alone`: whether no front-ends are beside this server."""
        self._store = store
        self._alone = alone
        self._blobs = blobs
        self._wake = wake
        self._lock = asyncio.Lock()

    async def add(self, config: RunConfig, *, again: bool = False) -> Run:
        """The run of that name, if it has the same config, or else a new one.

        `again`: a server that is started anew with a run's file. The operational settings that the run has
        by then hold, for the operator may have changed them.
        """
        if not self._alone:
            require_rounds(config)
        async with self._lock:
            known = await asyncio.to_thread(self._store.run_by_name, config.name)
            if known is not None:
                ignored = OPERATIONAL if again else ()
                if (change := difference(make_config(known.config), config, ignored)) is not None:
                    raise ConfigError(
                        f"a run named {config.name!r} was made with other settings ({change}); "
                        "give this one another name, or change that one with fedmpq runs set"
                    )
                for name, words in other_operation(known, config).items():
                    what = f"{name}: {words}; fedmpq runs set {known.name} {name}=... changes it"
                    say(log, what, level=logging.WARNING, run=known.name)
                return known
            test = await asyncio.to_thread(load_test_data, config)
            images = images_of(config, test)
            # Images that the model cannot read are refused before the run begins.
            await asyncio.to_thread(load_calibration_data, config, images.form)
            await check_export(config)
            graph, model = await first_model(config, images)
            # A method that cannot be served is refused here, and not when its turn has come.
            served_method(config, Graph.from_bytes(graph))
            run = await asyncio.to_thread(self._store_run, config, images.class_names, graph, model)
        say(log, "run queued", run=run.name, run_id=run.run_id)
        self._wake()
        return run

    def _store_run(self, config: RunConfig, class_names: Sequence[str], graph: bytes, model: bytes) -> Run:
        with self._blobs.lock:
            names = self._blobs.put(graph), self._blobs.put(model)
            return self._store.queue_run(config.name, config.to_dict(), class_names, *names, time.time())
