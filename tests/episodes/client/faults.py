"""An HTTP server on a real socket that does what real ones do on bad days.

    with FaultServer(Drop(), Answer(503, retry_after="0"), Answer(200, {"runs": []})) as server: ...

Each request takes the next act; the last one is repeated. What was asked is in `requests`.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.waiting import until


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    connection: int


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: Any = None
    """JSON, or bytes as they are."""
    retry_after: str | None = None
    location: str | None = None
    is_last: bool = False
    """The connection is closed after it, without a word."""
    is_half: bool = False
    """The connection breaks in the middle of it."""


@dataclass(frozen=True)
class Drop:
    """Reads the request, and is gone."""


@dataclass(frozen=True)
class Garbage:
    said: bytes = b"\x16\x03\x01 not http\r\n\r\n"


@dataclass(frozen=True)
class Hang:
    """Says nothing until the test is over."""


@dataclass(frozen=True)
class Wait:
    """Answers when `now` is set."""

    answer: Answer
    now: threading.Event = field(default_factory=threading.Event)


Act = Answer | Drop | Garbage | Hang | Wait | Callable[[Seen], Answer]


class FaultServer:
    def __init__(self, *acts: Act, tls: ssl.SSLContext | None = None):
        self._acts, self._tls = list(acts), tls
        self.requests: list[Seen] = []
        self.connections = 0
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"

    def __enter__(self) -> FaultServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def wait_for(self, path: str, count: int = 1) -> list[Seen]:
        """Until so many requests for it were read."""

        def found() -> list[Seen]:
            return [seen for seen in self.requests if seen.path.endswith(path)]

        until(lambda: len(found()) >= count, details=lambda: f"{path}: {self.requests}")
        return found()

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        try:
            stream = self._tls.wrap_socket(connection, server_side=True) if self._tls else connection
            with stream, stream.makefile("rb") as lines:
                while (seen := read_request(lines, number)) is not None:
                    with self._lock:
                        self.requests.append(seen)
                        act = self._acts.pop(0) if len(self._acts) > 1 else self._acts[0]
                    if not self._perform(stream, act, seen):
                        return
        except OSError:
            pass

    def _perform(self, stream: socket.socket, act: Act, seen: Seen) -> bool:
        """False: this connection is done for."""
        if isinstance(act, Wait):
            act.now.wait(20)
            act = act.answer
        if isinstance(act, Answer):
            return say(stream, act)
        if isinstance(act, Garbage):
            stream.sendall(act.said)
        elif isinstance(act, Hang):
            self._over.wait(20)
        elif not isinstance(act, Drop):
            return say(stream, act(seen))
        return False


def read_request(lines: Any, number: int) -> Seen | None:
    first = lines.readline().decode().split()
    if len(first) < 2:
        return None
    headers: dict[str, str] = {}
    while line := lines.readline().decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    body = lines.read(int(headers.get("content-length", 0)))
    return Seen(first[0], first[1], headers, json.loads(body) if body else None, number)


def say(stream: socket.socket, answer: Answer) -> bool:
    content = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    head = [f"HTTP/1.1 {answer.status} Told", f"Content-Length: {len(content)}", "Content-Type: application/json"]
    head += [f"Retry-After: {answer.retry_after}"] if answer.retry_after is not None else []
    head += [f"Location: {answer.location}"] if answer.location is not None else []
    sent = "\r\n".join([*head, "", ""]).encode() + content
    stream.sendall(sent[:-5] if answer.is_half else sent)
    return not answer.is_last and not answer.is_half


def lease(number: int = 0, lease_s: float = 60.0) -> dict[str, Any]:
    """As a server tells it."""
    return {
        "episode_id": f"e{number}",
        "attempt": 1,
        "run": "r",
        "group_id": "g",
        "index": number,
        "kind": "train",
        "task": {"id": "t", "environment": "arithmetic", "prompt": []},
        "seed": 7,
        "tags": {},
        "version": 0,
        "expires_at": 0.0,
        "lease_s": lease_s,
        "deadline": None,
        "base_url": "http://127.0.0.1:1/v1",
        "api_key": "ep-x",
        "model": "policy",
    }


def claimed(*leases: dict[str, Any]) -> Answer:
    return Answer(200, {"leases": list(leases), "retry_after_s": 0})


def beaten(seen: Seen, **told: Any) -> Answer:
    """The same word about every lease of a heartbeat or a release."""
    return Answer(200, {"beats": [{**ref, "can_continue": True, **told} for ref in seen.body["leases"]]})


def ended(seen: Seen, status: str = "accepted") -> Answer:
    refs = [{"episode_id": end["episode_id"], "attempt": end["attempt"]} for end in seen.body["ends"]]
    return Answer(200, {"ended": [{**ref, "status": status} for ref in refs]})


def polite(seen: Seen) -> Answer:
    """A server that agrees with whatever comes after a claim."""
    return ended(seen) if seen.path.endswith("/end") else beaten(seen)
