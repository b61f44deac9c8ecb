"""Played groups pushed to their trainer over ZeroMQ, each committed at the server when it is acknowledged.

Owns: the socket, what was acknowledged before. Never touches: the trainer's checkpoint, HTTP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from palestra.episodes.client.errors import EpisodeClientError
from palestra.types.episodes import PlayedGroup, PushedGroup

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""So that Ctrl-C is heard."""


class ListenError(EpisodeClientError):
    """There is nothing to listen on, or a group was passed over."""


class Pushed:
    """A group, to be made safe and then acknowledged: it comes again otherwise."""

    def __init__(self, group: PlayedGroup, ack: Callable[[], None]):
        self.group, self._ack = group, ack

    @property
    def number(self) -> int:
        return self.group.number

    def ack(self) -> None:
        """It is safe here: the server may forget it."""
        self._ack()


class Listener:
    """`Run.listen` makes it. For one thread."""

    def __init__(
        self,
        push_to: Callable[[str, str | None], None],
        commit: Callable[[int], object],
        run: str,
        address: str,
        *,
        after: int | None = None,
        wait_s: float | None = None,
        told: str | None = None,
    ):
        """`push_to`: tells the server to push here, or nowhere any more, unless it was told otherwise meanwhile."""
        self._push_to, self._commit, self._run = push_to, commit, run
        self.address, self._told = address, told
        self._after, self._wait_s = after or 0, wait_s
        self._acked: int | None = None
        self._open: int | None = None
        """The number of a group that waits for its acknowledgement."""
        self._context: Any = None
        self._socket: Any = None

    def __enter__(self) -> Listener:
        self._bind()
        try:
            self._told = self._told or self.address
            self._push_to(self._told, None)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        try:
            if self._acked is not None:
                self._commit(self._acked)  # the last answer may be lost with the socket
            self._push_to("", self._told)
        except EpisodeClientError as error:
            log.warning("the server was not told that nobody listens any more: %s", error)

    def __iter__(self) -> Iterator[Pushed]:
        while (payload := self._receive()) is not None:
            try:
                told = msgspec.json.decode(payload, type=PushedGroup)
            except msgspec.DecodeError as error:
                self._answer(f"refused: this is no group: {error}")
                continue
            if told.run != self._run:
                self._answer(f"refused: this is the trainer of run {self._run}")
            elif told.group.number <= self._after:
                self._answer(f"ack {told.group.number}")  # the last answer was lost on its way
            else:
                self._open = told.group.number
                yield self._pushed(told.group)

    def _pushed(self, group: PlayedGroup) -> Pushed:
        def ack() -> None:
            if self._open == group.number:
                self._open, self._after, self._acked = None, group.number, group.number
                self._answer(f"ack {group.number}")

        return Pushed(group, ack)

    def _receive(self) -> bytes | None:
        """None: nothing came for so long."""
        if self._open is not None:
            raise ListenError(
                f"group {self._open} was not acknowledged: once it is safe call ack(), then take the next"
            )
        waited_s = 0.0
        while not self._socket.poll(LOOK_S * 1000):
            waited_s += LOOK_S
            if self._wait_s is not None and waited_s >= self._wait_s:
                return None
        return self._socket.recv()

    def _answer(self, text: str) -> None:
        self._socket.send_string(text)

    def _bind(self) -> None:
        try:
            import zmq
        except ImportError:
            raise ListenError(
                "listening needs pyzmq: pip install pyzmq, or read the groups with Run.groups()"
            ) from None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 1000)  # the last answer may be on its way
        self._socket.setsockopt(zmq.IPV6, int("[" in self.address))
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self._close()
            raise ListenError(f"{self.address} cannot be listened on: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _close(self) -> None:
        self._socket.close()
        self._context.term()
