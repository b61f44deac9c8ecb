"""Helpers for the tests of a server: a server that is really open, and callers with cookies, without sockets and
without a gym.

with opened(Counter, max_sessions=10) as counter:
    caller = counter.caller()
    caller.post("/seed_session", {"initial_count": 3})
    assert caller.post("/add", {"count": 2}).value() == {"count": 5}
    assert caller.verify(model_response("It is 5."), expected_count=5)["reward"] == 1.0
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from palestra.gym.errors import PeerFailed
from palestra.gym.peers import GymPeers
from palestra.gym.records import GymConfig, ServerInstance, ServerKind
from palestra.gym.registry import load_class
from palestra.gym.servers.base import GymServer
from palestra.gym.wire import GymRequest, GymResponse, encoded
from palestra.types.gym import PARAMS
from palestra.util.json_types import JsonObject
from palestra.util.renamed import renamed

Script = Callable[[GymRequest], Any]
"""What a peer does with a call: it returns the body of its answer, or a GymResponse."""


class OpenedServer:
    """A server, and the event loop it runs on."""

    def __init__(self, server: GymServer, peers: GymPeers, runner: asyncio.Runner) -> None:
        self.server = server
        self._peers, self._runner = peers, runner

    def caller(self) -> SessionCaller:
        return SessionCaller(self)

    def post(self, path: str, body: object, cookies: Mapping[str, str]) -> GymResponse:
        return self._runner.run(self._peers.post(self.server.name, path, body, cookies=cookies))

    def look(self, path: str) -> GymResponse | None:
        return self._runner.run(self.server.look(path))


class SessionCaller:
    """A caller with a session, like an agent: cookies are sent back to the server that set them."""

    def __init__(self, opened: OpenedServer) -> None:
        self._opened = opened
        self.cookies: dict[str, str] = {}

    def post(self, path: str, body: object) -> GymResponse:
        """Sends a POST, and returns the answer whatever its status; the body goes through JSON, as over a socket."""
        answer = self._opened.post(path, body, self.cookies)
        self.cookies |= answer.cookies
        return GymResponse(
            status=answer.status, body=answer.raw(), cookies=answer.cookies, content_type=answer.content_type
        )

    def verify(self, response: JsonObject, **fields: object) -> JsonObject:
        """Returns the judged row. Raises PeerFailed if there is none."""
        row = {PARAMS: {"input": ""}, **fields, "response": response}
        answer = self.post("/verify", row)
        if not answer.is_ok:
            raise PeerFailed(self._opened.server.name, "/verify", answer.status, answer.raw())
        return answer.value()


class _Scripted(GymServer):
    def __init__(self, instance: ServerInstance, peers: GymPeers, script: Script) -> None:
        super().__init__(instance, peers)
        self._script = script

    async def answer(self, call: GymRequest) -> GymResponse:
        found = self._script(call)
        return found if isinstance(found, GymResponse) else GymResponse(body=found)


@contextmanager
def opened(
    server_class: type[GymServer], *, peers: Mapping[str, Script] | None = None, **settings: Any
) -> Iterator[OpenedServer]:
    """`peers` has the answers of other servers, by name."""
    named = {name: _instance(name, ServerKind.MODEL, {}) for name in peers or {}}
    instance = _instance("tested", server_class.kind, settings)
    config = GymConfig(
        servers={**named, instance.name: instance}, settings={}, head_host="127.0.0.1", head_port=0, secret="for tests"
    )
    with asyncio.Runner() as runner:
        all_peers = GymPeers(config)
        for name, script in (peers or {}).items():
            all_peers.add(_Scripted(named[name], all_peers, script))
        server = server_class(instance, all_peers)
        all_peers.add(server)
        runner.run(server.open())
        try:
            yield OpenedServer(server, all_peers, runner)
        finally:
            runner.run(server.close())


def _instance(name: str, kind: ServerKind, settings: JsonObject) -> ServerInstance:
    return ServerInstance(
        name=name, kind=kind, implementation=name, settings=settings, host="127.0.0.1", port=0, folder=None
    )


def server_beside(test_file: str) -> type[GymServer]:
    """Returns the server whose folder has this file in its `tests`."""
    folder = Path(test_file).absolute().parents[1]
    kind = ServerKind(folder.parent.name)
    made = _instance(folder.name, kind, {"entrypoint": "app.py"})
    return load_class(msgspec.structs.replace(made, folder=folder))


# Responses by hand


def model_response(text: str, *calls: tuple[str, JsonObject]) -> JsonObject:
    """Makes a Responses object: tool calls with their arguments, then the text."""
    made = [
        {"type": "function_call", "call_id": f"call_{n}", "name": name, "arguments": encoded(arguments).decode()}
        for n, (name, arguments) in enumerate(calls)
    ]
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "role": "assistant", "id": "msg_0", "status": "completed", "content": [part]}
    return {"id": "resp_0", "object": "response", "model": "by hand", "output": [*made, message], "usage": None}


__getattr__ = renamed(__name__, said="model_response")
