"""A line to a trainer that listens on ZeroMQ: something is sent, and what it says to that comes back.

Owns: one REQ socket, how long to wait. Never touches: what is sent.
"""

from __future__ import annotations

import asyncio
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

CONNECT_S = 2.0
LAST_WORD_S = 0.2
MAX_ANSWER_BYTES = 1024


class NotTaken(Exception):
    """Says why. The line is of no use any more; another one may be."""


class Line:
    def __init__(self, context: zmq.asyncio.Context, address: str):
        self._socket: Any = context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # nothing is sent before somebody listens
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        # Of a machine that is gone without a word.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._address = address
        self._socket.connect(address)

    async def ask(self, payload: bytes, ack_s: float) -> str:
        try:
            async with asyncio.timeout(CONNECT_S):  # unlike wait_for it never takes a cancellation for itself
                await self._socket.send(payload)
        except TimeoutError:
            raise NotTaken(f"nobody listens at {self._address}") from None
        answer = asyncio.ensure_future(self._socket.recv())
        gone = asyncio.ensure_future(recv_monitor_message(self._monitor))
        try:
            await asyncio.wait({answer, gone}, timeout=ack_s, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():  # its last word may still be in the socket
                await asyncio.wait({answer}, timeout=LAST_WORD_S)
            if not answer.done():
                why = "hung up" if gone.done() else f"did not answer for {ack_s:g} s"
                raise NotTaken(f"who listens at {self._address} {why}")
            return answer.result().decode(errors="replace")
        finally:
            answer.cancel()
            gone.cancel()

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close()
