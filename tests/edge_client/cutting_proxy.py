"""A TCP proxy that can cut its connections or let them hang without a word, as networks do."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress


class CuttingProxy:
    """Passes bytes between whoever connects to `address` and a port of this machine."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._flowing = threading.Event()
        self._flowing.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hold(self) -> None:
        """Connections stay open and nothing passes; new ones are taken and hang too."""
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        """Ends all connections."""
        pairs, self._pairs = self._pairs, []
        for end in (end for pair in pairs for end in pair):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.flow()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with near:
            self._flowing.wait()
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                return
            with far:
                self._pairs.append((near, far))
                with suppress(OSError):
                    self._pass_on(near, far)

    def _pass_on(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        while True:
            for source in select.select([near, far], [], [])[0]:
                data = source.recv(1 << 16)
                self._flowing.wait()
                if not data:
                    return
                other[source].sendall(data)
