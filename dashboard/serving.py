"""The web server around the application: in the foreground, or in a thread beside the federation's server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from fedmpq.dashboard.app import make_app
from fedmpq.dashboard.guard import Rules
from fedmpq.dashboard.operator import Operator
from fedmpq.dashboard.operator_token import operator_token, token_file
from fedmpq.dashboard.places import DashboardError, Place
from fedmpq.dashboard.server_place import ServerPlace
from fedmpq.dashboard.simulation_place import SimulationPlace
from fedmpq.server.certificates import TlsFiles, hosts_of, read_certificate
from fedmpq.server.state_folder import StateFolder
from fedmpq.system.addresses import is_loopback, join_address, split_address

LOOPBACK = "127.0.0.1"
BACKLOG = 64


@dataclass(frozen=True)
class Served:
    """A dashboard that listens; `words` says where, and what a reader must know."""

    url: str
    words: str


@dataclass(frozen=True)
class _Web:
    app: Starlette
    address: tuple[str, int]
    tls: TlsFiles | None
    token: Path | None
    """Where the operator's token is, if it is needed for anything."""

    def listen(self) -> socket.socket:
        host, port = self.address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            where = join_address(host, port)
            raise DashboardError(
                f"the dashboard cannot listen on {where}: {error.strerror}; name another port"
            ) from None
        return listener

    def server(self) -> uvicorn.Server:
        tls = self.tls
        return uvicorn.Server(
            uvicorn.Config(
                self.app,
                # Requests are no events of the federation; errors are, and go where its own go.
                log_config=None,
                access_log=False,
                log_level="warning",
                server_header=False,
                lifespan="off",
                ws="none",
                # A page that listens for events never ends its request by itself.
                timeout_graceful_shutdown=1,
                ssl_certfile=None if tls is None else tls.certificate,
                ssl_keyfile=None if tls is None else tls.key,
            )
        )

    def served(self, listener: socket.socket) -> Served:
        host, port = listener.getsockname()[:2]
        scheme = "http" if self.tls is None else "https"
        url = f"{scheme}://{join_address(host, port)}/"
        if self.token is None:
            return Served(url, f"dashboard on {url}")
        what = "its buttons need" if self.tls is None else "it needs"
        return Served(url, f"dashboard on {url}; {what} the operator's token, in {self.token}")


def dashboard_address(text: str) -> tuple[str, int]:
    """PORT, which is one of loopback's, or HOST:PORT; port 0 takes a free one."""
    return split_address(text if ":" in text else f"{LOOPBACK}:{text}", lowest_port=0)


def open_places(folders: Sequence[Path]) -> list[Place]:
    """What is in the folders; one that holds no run is refused."""
    places: list[Place] = []
    for number, folder in enumerate(folders):
        state = StateFolder(folder)
        if state.exists:
            places.append(ServerPlace(str(number), state))
        elif SimulationPlace.is_one(folder):
            places.append(SimulationPlace(str(number), folder))
        else:
            raise DashboardError(
                f"{folder} is no server's folder and no simulation's; name one that fedmpq server or fedmpq "
                "simulate has made"
            )
    return places


def serve_folders(folders: Sequence[Path], listen: str) -> None:
    """Shows the folders until Ctrl-C; nothing can be changed."""
    places = open_places(folders)
    web = _reading(places, dashboard_address(listen))
    with web.listen() as listener:
        print(web.served(listener).words, flush=True)
        web.server().run(sockets=[listener])


@contextmanager
def serving_beside(state: StateFolder, listen: str) -> Iterator[Served]:
    """Shows the server that is about to start in `state` and lets the operator act, in a thread."""
    place = ServerPlace("0", state, starting=True)
    web = _operating(place, dashboard_address(listen))
    with web.listen() as listener:
        server = web.server()
        thread = threading.Thread(target=server.run, args=([listener],), name="dashboard", daemon=True)
        thread.start()
        try:
            yield web.served(listener)
        finally:
            server.should_exit = True
            thread.join()
            with contextlib.suppress(OSError):
                place.close()


def _reading(places: list[Place], address: tuple[str, int]) -> _Web:
    if is_loopback(address[0]):
        return _Web(make_app(places, Rules.on_loopback(None)), address, None, None)
    states = [place.state for place in places if isinstance(place, ServerPlace)]
    tls, token = _beyond(states[0] if states else None, address)
    names = hosts_of(read_certificate(tls.certificate))
    app = make_app(places, Rules.beyond([address[0], *names], token))
    return _Web(app, address, tls, token_file(states[0]))


def _operating(place: ServerPlace, address: tuple[str, int]) -> _Web:
    operator = Operator(place)
    if is_loopback(address[0]):
        place.state.create()
        rules = Rules.on_loopback(operator_token(place.state))
        return _Web(make_app([place], rules, operator), address, None, token_file(place.state))
    tls, token = _beyond(place.state, address)
    names = hosts_of(read_certificate(tls.certificate))
    app = make_app([place], Rules.beyond([address[0], *names], token), operator)
    return _Web(app, address, tls, token_file(place.state))


def _beyond(state: StateFolder | None, address: tuple[str, int]) -> tuple[TlsFiles, str]:
    """What serving beyond this machine takes: a certificate and a token."""
    where = join_address(*address)
    if state is None:
        raise DashboardError(
            f"{where} reaches beyond this machine, and a simulation has no certificate; take 127.0.0.1, and "
            "reach it from elsewhere with ssh -L"
        )
    files = TlsFiles(state.tls)
    if not files.certificate.exists():
        raise DashboardError(
            f"{where} reaches beyond this machine, and there is no TLS; make a certificate: "
            f"fedmpq server init --state {state.path}"
        )
    return files, operator_token(state)
