"""What an operator sees of versions: their states, and which board runs which; read from the store alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedmpq.proto import administration_pb2 as pb
from fedmpq.server.store.errors import NoVersion
from fedmpq.server.store.protocol import Store
from fedmpq.server.store.records import Client, Installation, Release
from fedmpq.server.stored_status import timestamp


def rollouts_status(store: Store) -> pb.RolloutsStatus:
    installed, releases = store.installations(), store.list_releases()
    names = {run.run_id: run.name for run in store.list_runs()}
    pinned = store.pins()
    boards = [
        board
        for client in store.list_clients()
        for board in _boards(store, client, installed, pinned.get(client.client_id, 0))
    ]
    return pb.RolloutsStatus(
        releases=[_release(release, names[release.run_id], installed) for release in releases], boards=boards
    )


def release_status(store: Store, release: Release) -> pb.ReleaseStatus:
    return _release(release, store.run(release.run_id).name, store.installations())


def _release(release: Release, run: str, installed: Sequence[Installation]) -> pb.ReleaseStatus:
    own = [each for each in installed if each.version == release.version]
    return pb.ReleaseStatus(
        version=release.version,
        run=run,
        round=release.round,
        state=release.state,
        reason=release.reason,
        formats=sorted(release.files),
        canary=len(release.canary),
        good=_boards_of(each for each in own if each.good_since is not None),
        failed=_boards_of(each for each in own if each.errors),
        running=_boards_of(each for each in own if each.running),
        max_errors=release.max_errors,
        soak_seconds=release.soak,
        created=timestamp(release.created),
        changed=timestamp(release.changed),
    )


def _boards_of(installed: Iterable[Installation]) -> int:
    return len({each.client_id for each in installed})


def _boards(
    store: Store, client: Client, installed: Sequence[Installation], pinned: int
) -> list[pb.BoardModel]:
    """One for each format that the client was offered; at least one."""
    own = [each for each in installed if each.client_id == client.client_id]
    wanted = _wanted(store, client.client_id)
    if not own:
        return [pb.BoardModel(name=client.name, wanted=wanted, pinned=pinned)]
    boards = []
    for form in sorted({each.format for each in own}):
        those = [each for each in own if each.format == form]
        running = next((each.version for each in those if each.running), 0)
        last = max(those, key=lambda each: (each.reported or each.offered, each.version))
        board = pb.BoardModel(name=client.name, format=form, version=running, wanted=wanted, pinned=pinned)
        board.ok, board.errors, board.reason = last.ok, last.errors, last.reason
        if last.reported is not None:
            board.reported.CopyFrom(timestamp(last.reported))
        boards.append(board)
    return boards


def _wanted(store: Store, client_id: str) -> int:
    try:
        due = store.release_for(client_id)
    except NoVersion:
        return 0
    return 0 if due is None else due[0].version
