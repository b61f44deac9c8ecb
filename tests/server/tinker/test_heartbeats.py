"""Heartbeats of many sessions are held back and answered together; each counts from when it arrives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from palestra.server.core.callers import ANYBODY
from palestra.server.core.sessions import TinkerSession, TinkerSessions
from palestra.server.http.auth import Authenticator
from palestra.server.tinker import heartbeats
from palestra.server.tinker.heartbeats import MANY, PATH, Heartbeats
from palestra.store import Store


async def beat(beats: Heartbeats, session_id: str) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"session_id": "%s"}' % session_id.encode()}

    async def send(message: Message) -> None:
        sent.append(message)

    await beats({"type": "http", "method": "POST", "path": PATH, "headers": [(b"host", b"127.0.0.1")]}, receive, send)
    return sent


@pytest.mark.parametrize("count", [3, MANY])
def test_every_session_that_lives_is_answered_and_others_reach_the_route(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "HOLD_S", 0.01)
    sessions, passed_on = TinkerSessions(), []

    async def route(scope: Any, receive: Any, send: Any) -> None:
        passed_on.append((await receive())["body"])

    async def run(store: Store) -> list[list[Message]]:
        authenticator = Authenticator(store, lambda _: None, {}, is_loopback=True, require_key=False)
        beats = Heartbeats(route, sessions, authenticator)
        return await asyncio.gather(*(beat(beats, name) for name in [*sessions.active, "gone"]))

    sessions.active = {str(number): TinkerSession(str(number), ANYBODY.owner) for number in range(count)}
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as store:
        *answers, nothing = asyncio.run(run(store))
    assert len(sessions.take_dirty()) == count
    assert [answer[0]["status"] for answer in answers] == [200] * count
    assert (nothing, passed_on) == ([], [b'{"session_id": "gone"}'])
