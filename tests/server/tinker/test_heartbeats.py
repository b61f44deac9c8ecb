"""Heartbeats of many sessions are held back and answered together; each counts from when it arrives."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from palestra.server.core.callers import ANYBODY
from palestra.server.core.sessions import TinkerSession, TinkerSessions
from palestra.server.tinker import heartbeats
from palestra.server.tinker.heartbeats import MANY, PATH, Heartbeats


class Anybody:
    async def admit(self, _: object) -> Any:
        return ANYBODY


async def beat(beats: Heartbeats, session_id: str) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"session_id": "%s"}' % session_id.encode()}

    async def send(message: Message) -> None:
        sent.append(message)

    await beats({"type": "http", "method": "POST", "path": PATH, "headers": []}, receive, send)
    return sent


@pytest.mark.parametrize("count", [3, MANY])
def test_every_session_that_lives_is_answered_and_others_reach_the_route(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "HOLD_S", 0.01)
    sessions, passed_on = TinkerSessions(), []

    async def route(scope: Any, receive: Any, send: Any) -> None:
        passed_on.append((await receive())["body"])

    async def run() -> list[list[Message]]:
        beats: Any = Heartbeats(route, sessions, Anybody())  # pyright: ignore[reportArgumentType]
        answers = asyncio.gather(*(beat(beats, name) for name in [*sessions.active, "gone"]))
        await asyncio.sleep(0)
        assert len(sessions.take_dirty()) == count
        return await answers

    sessions.active = {str(number): TinkerSession(str(number), ANYBODY.owner) for number in range(count)}
    *answers, nothing = asyncio.run(run())
    assert [answer[0]["status"] for answer in answers] == [200] * count
    assert (nothing, passed_on) == ([], [b'{"session_id": "gone"}'])
