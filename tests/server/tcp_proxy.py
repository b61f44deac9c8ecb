"""A proxy of connections as a virtual address or a load balancer has it: it follows /readyz, and knows nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

import httpx

LOOK_S = 0.1


class TcpProxy:
    def __init__(self, *ports: int):
        self._ports = ports
        self._ready: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._look, self._accept)]
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._listener.close()

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
            if port is None:
                time.sleep(LOOK_S)  # a refused connection is tried again at once
                raise ConnectionRefusedError
            far = socket.create_connection(("127.0.0.1", port))
        except OSError:
            near.close()
            return
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=_pump, args=(source, target), daemon=True).start()


def _is_ready(client: httpx.Client, port: int) -> bool:
    try:
        return client.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
    except httpx.HTTPError:
        return False


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for end in (source, target):  # whoever has gone, the other one is told
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
