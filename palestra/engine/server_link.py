"""The line to the server: a ZeroMQ DEALER, one msgpack record a message, under the server's epoch.

Owns: connecting, greeting, silence, waking a sleeping worker. Never touches: what the messages ask for.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from palestra.types.engine import FromWorker, Hello, ToWorker, Welcome, decode_to_worker, encode_message

log = logging.getLogger(__name__)

HELLO_EVERY_S = 1.0
SILENCE_S = 10.0  # the server pings every few seconds
INTAKE = 256  # messages taken in at once, so that a flood does not stop the computing
LIVENESS_MS = 5000
LINGER_MS = 2000  # for the last words of a worker that exits


@dataclass(frozen=True, slots=True)
class Received:
    message: ToWorker
    size_bytes: int


class ServerLink:
    def __init__(
        self,
        *,
        timeout_s: float,
        hello: Callable[[str], Hello],
        server_key: str | None = None,
        client_key: str | None = None,
    ):
        self.worker_id = uuid.uuid4().hex
        self.epoch = b""
        self._timeout_s, self._hello = timeout_s, hello
        self._welcome = False
        self._received_at = self._hello_at = 0.0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.worker_id.encode())
        for option, value in (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.LINGER, LINGER_MS),
            (zmq.IMMEDIATE, 1),  # what a dead server did not take is not kept for the next one
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 1000),
        ):
            self._socket.setsockopt(option, value)
        encrypt(self._socket, server_key, client_key)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._bell, self._rope = socket.socketpair()
        for end in (self._bell, self._rope):
            end.setblocking(False)
        self._poller = zmq.Poller()
        for source in (self._socket, self._monitor, self._bell):
            self._poller.register(source, zmq.POLLIN)

    def open(self, address: str) -> None:
        self._socket.connect(address)
        self._received_at = self._hello_at = time.monotonic()

    @property
    def wake_fd(self) -> int:
        return self._rope.fileno()

    def wake(self) -> None:
        """Ends a `receive` that waits, from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it is ringing already
            self._rope.send(b"\0")

    @property
    def is_lost(self) -> bool:
        """The server is gone."""
        return time.monotonic() - self._received_at > self._timeout_s

    def send(self, message: FromWorker) -> None:
        if self.epoch:
            self._put(self.epoch, message)

    def receive(self, wait_s: float) -> list[Received]:
        """Returns what has arrived; with nothing there, waits up to `wait_s` for the first message."""
        self._greet()
        wait_s = max(0.0, min(wait_s, self._deadline() - time.monotonic()))
        found = dict(self._poller.poll(ceil(wait_s * 1000)))
        if self._bell.fileno() in found:
            with contextlib.suppress(BlockingIOError):
                while self._bell.recv(4096):
                    pass
        received = list(self._read()) if self._socket in found else []
        if self._monitor in found:  # after the reading: what a dead server had said does not make it live
            self._watch()
        return received

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()

    def _deadline(self) -> float:
        """Returns when the link itself has something to do."""
        lost = self._received_at + self._timeout_s
        return min(lost, self._hello_at if not self._welcome else self._received_at + SILENCE_S) + 0.001

    def _greet(self) -> None:
        now = time.monotonic()
        if self._welcome and now - self._received_at > SILENCE_S:
            self._welcome, self._hello_at = False, now
        if not self._welcome and now >= self._hello_at:
            self._hello_at = now + HELLO_EVERY_S
            self._put(b"", self._hello(self.worker_id))

    def _put(self, epoch: bytes, message: FromWorker) -> None:
        # No server on the line: it learns from `Hello` what it missed.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([epoch, encode_message(message)], zmq.NOBLOCK, copy=False)

    def _watch(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
                if event == zmq.EVENT_DISCONNECTED:
                    log.info("server_gone")
                self._welcome, self._hello_at = False, time.monotonic()

    def _read(self) -> Iterator[Received]:
        for _ in range(INTAKE):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = _decode(frames)
            if isinstance(message, Welcome):
                self.epoch = message.epoch.encode()
            elif message is None or not self.epoch or frames[0] != self.epoch:
                continue
            self._welcome, self._received_at = True, time.monotonic()
            yield Received(message, len(frames[1]))


def encrypt(socket: zmq.Socket, server_key: str | None, client_key: str | None = None) -> None:
    """Encrypts the link before it connects: only the holder of that key can read what it sends, or answer it.
    `client_key`: the secret key by which the server knows this process."""
    if server_key is not None:
        if client_key is None:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        else:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_public(client_key.encode()), client_key.encode()
        socket.curve_serverkey = server_key.encode()
        socket.setsockopt(zmq.HEARTBEAT_IVL, LIVENESS_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * LIVENESS_MS)  # a machine that is gone says no goodbye


def _decode(frames: list[bytes]) -> ToWorker | None:
    try:
        _, payload = frames
        return decode_to_worker(payload)
    except (ValueError, msgspec.MsgspecError) as e:
        log.error("bad_message error=%r sizes=%s", e, [len(f) for f in frames])
        return None
