"""The worker's heartbeat: a thread that tells the server every few seconds how the compute loop is.

A call into torch may take long, so the loop cannot beat itself; a thread that only beats would beat beside a loop that
hangs. So the beat says how long the loop has been at what it does, and the server decides how long is too long.
Owns: the thread, its socket. Never touches: what the loop does.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import zmq

from palestra.engine.server_link import encrypt
from palestra.types.engine import WorkerHeartbeat, encode_message


class HeartbeatSender:
    def __init__(
        self, address: str, every_s: float, worker_id: str, server_key: str | None = None, client_key: str | None = None
    ):
        self._address, self._every_s = address, every_s
        self._worker_id, self._keys = worker_id, (server_key, client_key)
        self._now: tuple[str, float] | None = None
        """What the loop does and since when; None while it waits for messages. One object, so that two threads can
        share it without a lock."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def busy(self, doing: str) -> None:
        self._now = doing, time.monotonic()

    def idle(self) -> None:
        self._now = None

    def beat(self) -> WorkerHeartbeat:
        if (now := self._now) is None:
            return WorkerHeartbeat(pid=os.getpid(), worker_id=self._worker_id)
        doing, since = now
        busy_s = time.monotonic() - since
        return WorkerHeartbeat(pid=os.getpid(), worker_id=self._worker_id, doing=doing, busy_s=busy_s)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:  # a socket belongs to one thread
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # old beats are worth nothing
            encrypt(socket, *self._keys)
            socket.connect(self._address)
            while not self._ended.wait(self._every_s):
                with contextlib.suppress(zmq.Again):  # no server on the line
                    socket.send_multipart([b"", encode_message(self.beat())], zmq.NOBLOCK)
