"""A ZeroMQ socket to a trainer that listens: a message is sent, and its answer comes back."""

from __future__ import annotations

import asyncio
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

CONNECT_S = 2.0
LAST_WORD_S = 0.2
MAX_ANSWER_BYTES = 1024


class PushNotAcknowledged(Exception):
    """The message was not acknowledged; the text says why. The socket cannot be used any more; another one may work."""


class PushSocket:
    def __init__(self, context: zmq.asyncio.Context, address: str):
        self._socket: Any = context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is sent before a trainer listens
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        # To notice a machine that disappeared.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        self._socket.setsockopt(zmq.IPV6, int("[" in address))
        self._monitor: Any = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        self._address = address
        self._answer: asyncio.Future[bytes] | None = None
        self._gone: asyncio.Future[Any] | None = None
        self._socket.connect(address)

    async def send(self, payload: bytes) -> None:
        """Sends a message; the previous one must have been answered."""
        gone = self._gone = asyncio.ensure_future(recv_monitor_message(self._monitor))
        sent = asyncio.ensure_future(self._socket.send(payload))
        try:
            await asyncio.wait({sent, gone}, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            if not sent.done():
                raise PushNotAcknowledged(f"no trainer listens at {self._address}")
            sent.result()
        finally:
            sent.cancel()
        self._answer = asyncio.ensure_future(self._socket.recv())

    async def answer(self, wait_s: float) -> str | None:
        """Returns the answer to what was sent; None: there is none yet."""
        answer, gone = self._answer, self._gone
        assert answer is not None
        assert gone is not None
        await asyncio.wait({answer, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if gone.done():  # its last answer may still be in the socket
            await asyncio.wait({answer}, timeout=LAST_WORD_S)
        if answer.done():
            gone.cancel()
            return answer.result().decode(errors="replace")
        if gone.done():
            raise PushNotAcknowledged(f"the trainer at {self._address} closed the connection")
        return None

    def close(self) -> None:
        for waiting in (self._answer, self._gone):
            if waiting is not None:
                waiting.cancel()
        self._socket.disable_monitor()
        self._monitor.close()  # needed: the event loop holds a reference to it
        self._socket.close()
