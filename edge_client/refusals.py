"""Rounds that this board cannot do: the server hears why, and gives the place to another.

A full disk is no reason to end. The board waits until there is space, and then opens a new stream: that tells
the server that it can take part again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc.aio

from fedmpq.edge_client.backoff import Backoff
from fedmpq.edge_client.channel import Endpoint, federation
from fedmpq.edge_client.conditions import Conditions
from fedmpq.edge_client.connection import Connection, enrol
from fedmpq.edge_client.disk_space import full_words, is_full, until_there_is_space
from fedmpq.edge_client.identity import Identity, IdentityError, load_identity
from fedmpq.edge_client.outbox import RoundKey
from fedmpq.edge_client.state_folder import StateFolder
from fedmpq.edge_client.transfer import Patience, StalledError, decline
from fedmpq.exchange.wire import phase_to_message
from fedmpq.proto import federation_pb2 as pb
from fedmpq.system.logs import with_facts

LAST_WORDS_SECONDS = 10.0

log = logging.getLogger("fedmpq.client")


class Refusals:
    """What one session has refused, and why."""

    def __init__(self, connection: Connection, folder: Path, retry: Backoff, patience: Patience) -> None:
        self.needed_bytes = 0
        """What the current round writes to the disk."""
        self._connection = connection
        self._folder = folder
        self._retry = retry
        self._patience = patience
        self._given_up: tuple[RoundKey, str] | None = None
        self._waiting: asyncio.Task[None] | None = None

    def remember(self, key: RoundKey, reason: str) -> None:
        """The round is not done here, also if it is asked for again."""
        self._given_up = key, reason

    async def give_up(self, key: RoundKey, reason: str) -> None:
        self.remember(key, reason)
        log.error("round %d: cannot be done here: %s", key.round, reason, extra=_facts(key))
        await self._decline(key, reason)

    async def refuse_again(self, key: RoundKey) -> bool:
        """Whether the round was given up before; the server hears it once more then."""
        if self._given_up is None or self._given_up[0] != key:
            return False
        await self._decline(*self._given_up)
        return True

    def wait_for_space(self, key: RoundKey | None) -> None:
        """What this round writes, or a run before its rounds (None), did not fit on the disk: others may have
        the place until it does."""
        reason = full_words(self._folder, self.needed_bytes)
        if key is None:
            log.error("the run cannot be taken up now: %s", reason)
        else:
            log.error("round %d: cannot be done now: %s", key.round, reason, extra=_facts(key))
        space = partial(until_there_is_space, self._folder, self.needed_bytes, self._retry.fresh())
        self._wait(key, reason, space, f"there is space in {self._folder} again")

    def wait_for(self, key: RoundKey, reason: str, conditions: Conditions) -> None:
        """This board may not work now: others may have the place until it may."""
        words = f"not now: {reason}"
        log.warning("round %d: %s", key.round, words, extra=_facts(key))
        self._wait(key, words, conditions.until_met, "this board may work again")

    def _wait(
        self, key: RoundKey | None, reason: str, until: Callable[[], Awaitable[None]], words: str
    ) -> None:
        if self._waiting is None or self._waiting.done():
            self._waiting = asyncio.create_task(self._come_back(key, reason, until, words))

    def end(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    async def _come_back(
        self, key: RoundKey | None, reason: str, until: Callable[[], Awaitable[None]], words: str
    ) -> None:
        """It is no part of the round, which may be over long before there is space, or it may work."""
        with suppress(grpc.aio.AioRpcError):
            await self._decline(key, reason)
        await until()
        log.info("%s", words)
        self._connection.renew()

    async def _decline(self, key: RoundKey | None, reason: str) -> None:
        request = pb.DeclineRequest(reason=reason)
        if key is not None:
            request.run_id, request.round = key.run_id, key.round
            request.phase = phase_to_message(key.phase)
        attempt = partial(decline, request=request, patience=self._patience)
        await self._connection.persist("the refusal", attempt)


async def enrol_on_full_disk(
    endpoint: Endpoint, request: pb.EnrollRequest, state: StateFolder, retry: Backoff, patience: float
) -> Identity:
    """The identity, once there is space for it: an enrolment can be repeated until its identity is used."""
    while True:
        try:
            return await enrol(endpoint, request, state.identity, retry, patience)
        except OSError as error:
            if not is_full(error):
                raise
        await until_there_is_space(state.folder, 0, retry.fresh())


async def last_words(endpoint: Endpoint, identity_file: Path, reason: str, retry: Backoff) -> None:
    """Tells the server why this board cannot even begin, if it is one that the server knows and can hear."""
    with suppress(IdentityError, StalledError, grpc.aio.AioRpcError):
        if (identity := load_identity(identity_file)) is None:
            return
        async with endpoint.open() as channel:
            request = pb.DeclineRequest(reason=reason)
            patience = Patience(LAST_WORDS_SECONDS, LAST_WORDS_SECONDS)
            await decline(federation(channel), identity.metadata, retry, request, patience)


def _facts(key: RoundKey) -> dict[str, object]:
    return with_facts({"run": key.run_id, "round": key.round})
