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
NOT_TOLD = "the server was not told that nobody listens any more: %s"


class ListenError(EpisodeClientError):
    """There is nothing to listen on, or a group was passed over."""


class Inbox:
    """What came, and what is answered to it: for threads and event loops alike."""

    def __init__(self, run: str, after: int | None):
        self._run, self._after = run, after or 0
        self.acked: int | None = None
        self._open: int | None = None
        """The number of a group that waits for its acknowledgement."""

    def check_acked(self) -> None:
        if self._open is not None:
            raise ListenError(
                f"group {self._open} was not acknowledged: once it is safe call ack(), then take the next"
            )

    def take(self, payload: bytes) -> PlayedGroup | str:
        """A group that is new; else the answer to what came."""
        try:
            told = msgspec.json.decode(payload, type=PushedGroup)
        except msgspec.DecodeError as error:
            return f"refused: this is no group: {error}"
        if told.run != self._run:
            return f"refused: this is the trainer of run {self._run}"
        if told.group.number <= self._after:
            return f"ack {told.group.number}"  # the last answer was lost on its way
        self._open = told.group.number
        return told.group

    def ack(self, number: int) -> str | None:
        """The answer; None: nobody waits for it any more."""
        if self._open != number:
            return None
        self._open, self._after, self.acked = None, number, number
        return f"ack {number}"


class Ear:
    """A socket that is listened on."""

    def __init__(self, address: str, *, is_async: bool):
        try:
            import zmq
            import zmq.asyncio
        except ImportError:
            raise ListenError(
                "listening needs pyzmq: pip install pyzmq, or read the groups with Run.groups()"
            ) from None
        self._context: Any = zmq.asyncio.Context() if is_async else zmq.Context()
        self.socket: Any = self._context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 1000)  # the last answer may be on its way
        self.socket.setsockopt(zmq.IPV6, int("[" in address))
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise ListenError(f"{address} cannot be listened on: {error}") from None
        self.address: str = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Up to a second, while the last answer is on its way."""
        self.socket.close()
        self._context.term()


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
        self._push_to, self._commit = push_to, commit
        self.address, self._told = address, told
        self._wait_s = wait_s
        self._inbox = Inbox(run, after)
        self._ear: Ear | None = None

    def __enter__(self) -> Listener:
        self._ear = Ear(self.address, is_async=False)
        self.address = self._ear.address
        try:
            self._told = self._told or self.address
            self._push_to(self._told, None)
        except BaseException:
            self._ear.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open_ear.close()
        try:
            if self._inbox.acked is not None:
                self._commit(self._inbox.acked)  # the last answer may be lost with the socket
            self._push_to("", self._told)
        except EpisodeClientError as error:
            log.warning(NOT_TOLD, error)

    def __iter__(self) -> Iterator[Pushed]:
        while (payload := self._receive()) is not None:
            taken = self._inbox.take(payload)
            if isinstance(taken, str):
                self._open_ear.socket.send_string(taken)
            else:
                yield self._pushed(taken)

    def _pushed(self, group: PlayedGroup) -> Pushed:
        def ack() -> None:
            if (answer := self._inbox.ack(group.number)) is not None:
                self._open_ear.socket.send_string(answer)

        return Pushed(group, ack)

    def _receive(self) -> bytes | None:
        """None: nothing came for so long."""
        self._inbox.check_acked()
        socket, waited_s = self._open_ear.socket, 0.0
        while not socket.poll(LOOK_S * 1000):
            waited_s += LOOK_S
            if self._wait_s is not None and waited_s >= self._wait_s:
                return None
        return socket.recv()

    @property
    def _open_ear(self) -> Ear:
        if self._ear is None:
            raise ListenError("nobody listens yet: with run.listen(…) as groups")
        return self._ear
