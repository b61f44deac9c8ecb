"""The server's end of the link to one engine worker: a ZeroMQ socket that outlives restarts of both processes.

Frames to and from the worker: epoch, then one msgpack record. What arrives under another epoch is from before a restart
and is ignored; only `Hello`, `WorkerHeartbeat` and requests for files, which a worker needs to begin, are always read.

Owns: the socket, epochs. Never touches: the content of messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

import zmq

from palestra.server.core.workers.link_security import ZAP_DOMAIN, LinkSecurity
from palestra.types.engine import (
    FileRequest,
    FromWorker,
    Hello,
    ToWorker,
    Welcome,
    WorkerHeartbeat,
    decode_from_worker,
    encode_message,
)

MAX_IPC_PATH = 100  # the system's limit is 107 bytes
LIVENESS_MS = 5000


@dataclass(frozen=True, slots=True)
class WorkerFrame:
    message: FromWorker
    frame: bytes
    """The record as it arrived: kept and journaled without encoding it again."""
    sender: bytes


class WorkerLink:
    def __init__(self, address: str, security: LinkSecurity | None = None):
        """`security`: of a link over the network, which must be encrypted."""
        if address.startswith("tcp:") and security is None:
            raise ValueError(f"the link at {address} would not be encrypted")
        self.address = address
        self._socket = (zmq.Context.instance() if security is None else security.context).socket(zmq.ROUTER)
        if security is not None:
            self._socket.curve_secretkey, self._socket.curve_server = security.secret_key, True
            self._socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            self._socket.setsockopt(zmq.IPV6, 1)
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, LIVENESS_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * LIVENESS_MS)  # a machine that is gone says no goodbye
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.bind(address)
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.FD, self._look)
        self._peer: bytes | None = None
        self._epoch = b""

    @property
    def is_up(self) -> bool:
        return self._peer is not None

    def welcome(self, hello: Hello) -> None:
        """Accepts this worker, under a new epoch."""
        self._peer, self._epoch = hello.worker_id.encode(), secrets.token_hex(8).encode()
        self._send_frames(encode_message(Welcome(epoch=self._epoch.decode())))

    def hang_up(self) -> None:
        self._peer = None

    def send(self, message: ToWorker) -> None:
        """Sends a message; it is dropped if there is no worker, because a new worker is told everything again."""
        if self._peer is not None:
            self._send_frames(encode_message(message))

    def reply(self, to: bytes, message: ToWorker) -> None:
        """Answers a request for a file, which may come before the worker's `Hello`."""
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([to, b"", encode_message(message)], copy=False)
        self._look()

    def send_encoded(self, payload: bytes) -> None:
        if self._peer is not None:
            self._send_frames(payload)

    async def receive(self) -> WorkerFrame:
        while True:
            try:
                peer, epoch, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            message = decode_from_worker(frame)
            is_always_read = isinstance(message, Hello | WorkerHeartbeat | FileRequest)
            if is_always_read or (peer == self._peer and epoch == self._epoch):
                return WorkerFrame(message, frame, peer)

    def close(self) -> None:
        self._peer = None
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
            self._socket.close()

    def _send_frames(self, payload: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the worker is gone: its exit is noticed elsewhere
            self._socket.send_multipart([self._peer or b"", self._epoch, payload], copy=len(payload) < 65536)
        self._look()

    def _look(self) -> None:
        """Reads messages. The socket's descriptor signals once for all that wait, and sending clears the signal, so
        this is called each time."""
        if self._socket.EVENTS & zmq.POLLIN:
            self._arrived.set()


def address_in(state: Path, name: str) -> str:
    """Returns an ipc address that a restarted server finds again: in the state folder or, if that path is too long for
    a socket, in a folder of this user's below the temporary one."""
    file = state / f"{name}.ipc"
    if len(str(file).encode()) > MAX_IPC_PATH:
        folder = Path(tempfile.gettempdir()) / f"palestra-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user; set TMPDIR to a folder of your own")
        file = folder / f"{hashlib.sha256(str(file).encode()).hexdigest()[:24]}.ipc"
    file.parent.mkdir(parents=True, exist_ok=True)
    return f"ipc://{file}"
