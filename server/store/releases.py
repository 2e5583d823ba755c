"""Versions of models that boards are to run, in SQL.

A version's way: canary, then full, then superseded by the next full one; rolled back from the first two.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from fedmpq.server.database import clients, installations, members, pins, releases
from fedmpq.server.store.errors import NoVersion, StoreError, UnknownRelease
from fedmpq.server.store.records import Installation, ModelReport, Release, ReleaseState
from fedmpq.server.store.runs import read_run
from fedmpq.server.store.transactions import Transactions


class SqlReleases(Transactions):
    """`Releases` in a database."""

    def add_release(
        self,
        run_id: str,
        number: int,
        files: Mapping[str, Collection[str]],
        share: float,
        max_errors: float,
        soak: float,
        now: float,
    ) -> Release:
        with self._write() as connection:
            run = read_run(connection, run_id)
            if (open_one := _in_state(connection, run_id, "canary")) is not None:
                raise StoreError(
                    f"version {open_one.version} of run {run.name!r} is in its canary; wait for its end, or "
                    f"take it back: fedmpq rollout rollback {run.name}"
                )
            newest = connection.execute(select(func.max(releases.c.version))).scalar() or 0
            canary = chosen_first(_free_members(connection, run_id), newest + 1, share)
            if not canary:
                raise StoreError(f"run {run.name!r} has no client that is neither revoked nor pinned")
            connection.execute(
                insert(releases).values(
                    version=newest + 1,
                    run_id=run_id,
                    round=number,
                    files=json.dumps({name: sorted(hashes) for name, hashes in files.items()}),
                    state="canary",
                    reason="",
                    canary=json.dumps(sorted(canary)),
                    max_errors=max_errors,
                    soak=soak,
                    created=now,
                    changed=now,
                )
            )
            return _read(connection, newest + 1)

    def list_releases(self) -> list[Release]:
        with self._read() as connection:
            rows = connection.execute(select(releases).order_by(releases.c.version.desc()))
            return [_release_of(row) for row in rows]

    def release(self, version: int) -> Release:
        with self._read() as connection:
            return _read(connection, version)

    def release_for(self, client_id: str) -> tuple[Release, int] | None:
        with self._read() as connection:
            # One of the runs' versions at least, or all that is asked for is not known here.
            numbers = _numbers(connection, client_id)
            known = [release for release in _of_runs(connection, numbers) if release.state != "superseded"]
            if not known:
                return None
            pinned = connection.execute(_pin_of(client_id)).scalar()
            wanted = _read(connection, pinned) if pinned is not None else _due(known, client_id)
        return wanted, numbers[wanted.run_id]

    def offer_release(self, client_id: str, version: int, wanted: str, now: float) -> None:
        known = select(installations.c.version).where(_is_installation(client_id, version, wanted))
        with self._read() as connection:
            if connection.execute(known).one_or_none() is not None:
                return
        with self._write() as connection:
            if connection.execute(known).one_or_none() is not None:
                return
            values: dict[str, Any] = {"version": version, "client_id": client_id, "format": wanted}
            values |= {"running": False, "offered": now, "ok": 0, "errors": 0, "reason": ""}
            connection.execute(insert(installations).values(**values))

    def report_model(self, client_id: str, report: ModelReport, now: float) -> Release | None:
        with self._write() as connection:
            _store_report(connection, client_id, report, now)
            release = _read(connection, report.version)
            if release.state != "canary":
                return None
            judged = _judged(release, _counted(connection, release))
            if judged is None:
                return None
            state, reason = judged
            if state == "full":
                _supersede(connection, release, now)
            return _moved(connection, release.version, state, reason, now)

    def roll_back(self, run_id: str, reason: str, now: float) -> Release:
        with self._write() as connection:
            run = read_run(connection, run_id)
            release = _in_state(connection, run_id, "canary") or _in_state(connection, run_id, "full")
            if release is None:
                raise StoreError(f"run {run.name!r} has no version to take back; fedmpq rollout status")
            taken_back = _moved(connection, release.version, "rolled_back", reason, now)
            if release.state == "full" and (former := _former(connection, run_id)) is not None:
                words = f"version {release.version} was taken back"
                _moved(connection, former.version, "full", words, now)
            return taken_back

    def installations(self) -> list[Installation]:
        with self._read() as connection:
            return _installations(connection, select(installations))

    def pin(self, client_id: str, version: int) -> None:
        with self._write() as connection:
            release = _read(connection, version)
            if release.run_id not in _numbers(connection, client_id):
                raise StoreError(f"version {version} is of a run that this client is not in")
            connection.execute(delete(pins).where(pins.c.client_id == client_id))
            connection.execute(insert(pins).values(client_id=client_id, version=version))

    def unpin(self, client_id: str) -> bool:
        with self._write() as connection:
            return connection.execute(delete(pins).where(pins.c.client_id == client_id)).rowcount == 1

    def pins(self) -> dict[str, int]:
        with self._read() as connection:
            return _pins(connection)

    def released_rounds(self, run_id: str) -> set[int]:
        with self._read() as connection:
            kept = {
                release for state in ("canary", "full") if (release := _round_in(connection, run_id, state))
            }
            former = _former(connection, run_id)
            pinned = (
                select(releases.c.round)
                .join(pins, pins.c.version == releases.c.version)
                .where(releases.c.run_id == run_id)
            )
            return kept | ({former.round} if former else set()) | set(connection.execute(pinned).scalars())


def chosen_first(client_ids: Collection[str], version: int, share: float) -> set[str]:
    """That share of the clients, rounded up: those whose SHA-256 of id and version is least. Other versions
    begin with others, and whoever looks again finds the same."""
    ranked = sorted(client_ids, key=lambda each: hashlib.sha256(f"{version}.{each}".encode()).digest())
    return set(ranked[: math.ceil(share * len(ranked))])


def error_share(reports: Iterable[Installation]) -> float:
    """The mean over clients of errors / (ok + errors), of those that have counted anything.

    Each client weighs the same, however much it counts: one alone cannot drown the others.
    """
    shares = [each.errors / (each.ok + each.errors) for each in reports if each.ok + each.errors]
    return sum(shares) / len(shares) if shares else 0.0


def _judged(release: Release, reports: list[Installation]) -> tuple[ReleaseState, str] | None:
    """What the reports of a canary make of it; None: it stays one."""
    share = error_share(reports)
    if share > release.max_errors:
        last = next((each.reason for each in reports if each.errors and each.reason), "")
        words = f"errors {share:.1%}, above {release.max_errors:.1%}"
        return "rolled_back", f"{words}: {last}" if last else words
    if reports and all(_has_soaked(each, release.soak) for each in reports):
        return "full", f"good on {len({each.client_id for each in reports})} boards for {release.soak:g} s"
    return None


def _has_soaked(report: Installation, soak: float) -> bool:
    if not report.running or report.good_since is None or report.reported is None:
        return False
    return report.reported - report.good_since >= soak


def _store_report(connection: Connection, client_id: str, report: ModelReport, now: float) -> None:
    this = _is_installation(client_id, report.version, report.format)
    row = connection.execute(select(installations).where(this)).one_or_none()
    if row is None:
        raise UnknownRelease(
            f"this client was not offered version {report.version} as {report.format!r}: ask for its model "
            "first"
        )
    values: dict[str, Any] = {"ok": report.ok, "errors": report.errors, "reported": now}
    failed = report.errors > row.errors or not report.running
    values["good_since"] = None if failed else (now if row.good_since is None else row.good_since)
    if report.errors:
        values["reason"] = report.reason
    if report.running:
        others = (installations.c.client_id == client_id, installations.c.format == report.format)
        connection.execute(update(installations).where(*others).values(running=False))
    connection.execute(update(installations).where(this).values(running=report.running, **values))


def _counted(connection: Connection, release: Release) -> list[Installation]:
    """Of the clients that get the canary: not of those that were revoked or pinned to another since."""
    pinned = _pins(connection)
    chosen = (
        select(installations)
        .join(clients, clients.c.client_id == installations.c.client_id)
        .where(installations.c.version == release.version, clients.c.revoked.is_(None))
    )
    return [
        each
        for each in _installations(connection, chosen)
        if each.client_id in release.canary and pinned.get(each.client_id, release.version) == release.version
    ]


def _due(known: list[Release], client_id: str) -> Release:
    """The canary if the client is in it, or else the newest full version."""
    for release in known:
        if release.state == "full" or (release.state == "canary" and client_id in release.canary):
            return release
    newest = known[0]
    if newest.state == "canary":
        raise NoVersion(f"version {newest.version} is tried on other boards first: ask again later")
    raise NoVersion(f"version {newest.version} was taken back, and there is none before it: ask again later")


def _supersede(connection: Connection, release: Release, now: float) -> None:
    former = _in_state(connection, release.run_id, "full")
    if former is not None:
        words = f"version {release.version} took its place"
        _moved(connection, former.version, "superseded", words, now)


def _moved(connection: Connection, version: int, state: ReleaseState, reason: str, now: float) -> Release:
    values = {"state": state, "reason": reason, "changed": now}
    connection.execute(update(releases).where(releases.c.version == version).values(**values))
    return _read(connection, version)


def _former(connection: Connection, run_id: str) -> Release | None:
    """The version that was for every client before the full one."""
    return _in_state(connection, run_id, "superseded")


def _in_state(connection: Connection, run_id: str, state: str) -> Release | None:
    """The newest in that state."""
    chosen = select(releases).where(releases.c.run_id == run_id, releases.c.state == state)
    row = connection.execute(chosen.order_by(releases.c.version.desc()).limit(1)).one_or_none()
    return None if row is None else _release_of(row)


def _round_in(connection: Connection, run_id: str, state: str) -> int | None:
    release = _in_state(connection, run_id, state)
    return None if release is None else release.round


def _read(connection: Connection, version: int) -> Release:
    row = connection.execute(select(releases).where(releases.c.version == version)).one_or_none()
    if row is None:
        raise UnknownRelease(f"there is no version {version}; fedmpq rollout status lists them")
    return _release_of(row)


def _of_runs(connection: Connection, run_ids: Collection[str]) -> list[Release]:
    """The newest first."""
    chosen = select(releases).where(releases.c.run_id.in_(run_ids)).order_by(releases.c.version.desc())
    return [_release_of(row) for row in connection.execute(chosen)]


def _numbers(connection: Connection, client_id: str) -> dict[str, int]:
    """The client's number in each run that it is in."""
    chosen = select(members.c.run_id, members.c.client).where(members.c.client_id == client_id)
    return {row.run_id: row.client for row in connection.execute(chosen)}


def _free_members(connection: Connection, run_id: str) -> set[str]:
    """Clients of the run that are neither revoked nor pinned."""
    chosen = (
        select(members.c.client_id)
        .join(clients, clients.c.client_id == members.c.client_id)
        .where(members.c.run_id == run_id, clients.c.revoked.is_(None))
    )
    return set(connection.execute(chosen).scalars()) - _pins(connection).keys()


def _pins(connection: Connection) -> dict[str, int]:
    return {row.client_id: row.version for row in connection.execute(select(pins))}


def _pin_of(client_id: str) -> Select[Any]:
    return select(pins.c.version).where(pins.c.client_id == client_id)


def _is_installation(client_id: str, version: int, wanted: str) -> Any:
    return (
        (installations.c.version == version)
        & (installations.c.client_id == client_id)
        & (installations.c.format == wanted)
    )


def _installations(connection: Connection, chosen: Select[Any]) -> list[Installation]:
    columns = installations.c
    ordered = chosen.order_by(columns.version.desc(), columns.offered, columns.client_id, columns.format)
    return [Installation(**row) for row in connection.execute(ordered).mappings()]


def _release_of(row: Row[Any]) -> Release:
    return Release(
        version=row.version,
        run_id=row.run_id,
        round=row.round,
        files=json.loads(row.files),
        state=row.state,
        reason=row.reason,
        canary=frozenset(json.loads(row.canary)),
        max_errors=row.max_errors,
        soak=row.soak,
        created=row.created,
        changed=row.changed,
    )
