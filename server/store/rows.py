"""Rows of the tables as records."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import Row

from fedmpq.method.state import ClientRecord
from fedmpq.server.claim_limits import ClaimLimits
from fedmpq.server.store.records import Answer, Client, Member, Run, Seat
from fedmpq.server.tokens import TokenRecord


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, timezone.utc)


def limits_of(row: Row[Any]) -> ClaimLimits:
    return ClaimLimits(row.max_samples, row.max_budget)


def token_of(row: Row[Any]) -> TokenRecord:
    return TokenRecord(
        token_id=row.token_id,
        digest=row.token_hash,
        created=moment(row.created),
        uses_left=row.uses_left,
        expires=None if row.expires is None else moment(row.expires),
        client_name=row.client_name,
        revoked=row.revoked is not None,
        limits=limits_of(row),
    )


def client_of(row: Row[Any]) -> Client:
    return Client(
        client_id=row.client_id,
        name=row.name,
        secret_hash=row.secret_hash,
        certificate_name=row.certificate_name,
        budget=row.budget,
        samples=row.samples,
        version=row.version,
        engine=row.engine,
        created=row.created,
        first_seen=row.first_seen,
        revoked=row.revoked,
        limits=limits_of(row),
    )


def run_of(row: Row[Any]) -> Run:
    return Run(
        sequence=row.sequence,
        run_id=row.run_id,
        name=row.name,
        config=json.loads(row.config),
        class_names=tuple(json.loads(row.class_names)),
        state=row.state,
        reason=row.reason,
        graph=row.graph,
        model=row.model,
        bit_widths=tuple(row.bit_widths or b""),
        round=row.round,
        ready=row.ready,
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
        created=row.created,
        ended=row.ended,
    )


def member_of(row: Row[Any]) -> Member:
    dealt, returned = _widths(row.dealt), _widths(row.returned)
    return Member(
        client_id=row.client_id,
        record=ClientRecord(row.client, row.budget, row.samples, dealt, returned),
        strikes=row.strikes,
        accuracy=row.accuracy,
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
    )


def seat_of(row: Row[Any]) -> Seat:
    # A row keeps what was thrown out, or is asked for again; that is no answer.
    answered = row.state == "updated"
    return Seat(
        client=row.client,
        bit_widths=tuple(row.bit_widths),
        payload=row.payload,
        payload_bytes=row.payload_bytes,
        state=row.state,
        reason=row.reason,
        answer=Answer(row.update, row.update_bytes, row.receipt_id) if answered else None,
        version=row.version,
        sent_model=row.sent_model,
    )


def _widths(data: bytes | None) -> tuple[int, ...] | None:
    return None if data is None else tuple(data)
