"""A proxy of connections as a load balancer has it: it follows /readyz, and answers 503 while nobody is ready."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from types import TracebackType
from typing import Self

import httpx

LOOK_S = 0.1
AWAY = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class TcpProxy:
    def __init__(self, *ports: int, checks: bool = True):
        """Without `checks` the first port counts as ready."""
        self._ports = ports
        self._ready: int | None = None if checks else ports[0]
        self._budget = math.inf
        self._flowing = threading.Event()
        self._flowing.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        works = (self._look, self._accept) if checks else (self._accept,)
        self._threads = [threading.Thread(target=work, daemon=True) for work in works]
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._listener.close()

    def hold_after(self, size_bytes: int) -> None:
        """Lets so many bytes of clients pass from now on, and then nothing until `release`."""
        self._budget = size_bytes

    @property
    def is_held(self) -> bool:
        return not self._flowing.is_set()

    def release(self) -> None:
        self._budget = math.inf
        self._flowing.set()

    @property
    def ready_port(self) -> int | None:
        return self._ready

    def _look(self) -> None:
        with httpx.Client(timeout=2.0, verify=False, trust_env=False) as client:
            while not self._ended.wait(LOOK_S):
                self._ready = next((port for port in self._ports if _is_ready(client, port)), None)

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        port = self._ready
        try:
            far = socket.create_connection(("127.0.0.1", port or 0))
        except OSError:
            time.sleep(LOOK_S)  # it is tried again at once
            with contextlib.suppress(OSError):
                near.recv(65536)
                near.sendall(AWAY)
                near.shutdown(socket.SHUT_WR)
                while near.recv(65536):  # to close with unread data would reset the connection
                    pass
            near.close()
            return
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(source, target, source is near), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                if is_counted:
                    self._budget -= len(data)
                    if self._budget < 0:
                        self._flowing.clear()
                        self._flowing.wait()
                target.sendall(data)
        for end in (source, target):  # whoever has gone, the other one is told
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def _is_ready(client: httpx.Client, port: int) -> bool:
    try:
        return client.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.HTTPError:
        return False
