"""Endpoints that are busy, broken, gone or talk nonsense: every call ends, in time and with a reason."""

from __future__ import annotations

import asyncio
import socket
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from palestra.gym.errors import BadAnswer, PeerFailed, UnreachableServer
from palestra.gym.models import upstream as upstream_module
from palestra.gym.models.settings import CommonSettings
from palestra.gym.models.upstream import Upstream
from palestra.util.backoff import LONGEST_ASKED_S
from tests.gym.models.scripted import Endpoint, always, asked, completion, in_turn

RESPONSES = "/v1/responses"
QUICK = CommonSettings(max_attempts=4, retry_wait_s=0.001)


def nobody() -> str:
    """A URL where nothing listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{found.getsockname()[1]}/v1"


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 520])
def test_a_status_that_passes_is_asked_again(status: int) -> None:
    answer, endpoint = asked(in_turn((status, {}), (status, {}), (200, completion())), RESPONSES, {"input": "Hi"})
    assert (answer.status, len(endpoint.asked)) == (200, 3)


@pytest.mark.parametrize(("status", "attempts"), [(429, 4), (503, 4), (500, 3), (401, 1), (404, 1), (400, 1), (307, 1)])
def test_retries_are_bounded_and_what_is_wrong_for_good_is_not_repeated(status: int, attempts: int) -> None:
    reply = always({"error": {"message": "no"}}, status, headers={"location": "/elsewhere"})
    answer, endpoint = asked(reply, RESPONSES, {"input": "Hi"}, max_attempts=4)
    assert (answer.status, len(endpoint.asked)) == (500, attempts)
    assert answer.body["_ng_failure_class"] == ("model_rate_limited" if status == 429 else "model_error")
    assert answer.body["failure_reason"].endswith(f"/v1/chat/completions answered {status}: no")
    assert answer.body["status"] == status


def test_retry_after_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    real = asyncio.sleep

    async def sleep(delay: float) -> None:
        if threading.current_thread() is threading.main_thread():  # servers of other tests sleep in theirs
            waited.append(delay)
        await real(0)

    monkeypatch.setattr(upstream_module.asyncio, "sleep", sleep)
    left = [{"retry-after": "7"}, {"retry-after": "9999"}, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}]

    async def reply(path: str, body: Any) -> web.StreamResponse:
        del path, body
        return web.json_response({}, status=429, headers=left.pop(0)) if left else web.json_response(completion())

    answer, _ = asked(reply, RESPONSES, {"input": "Hi"})
    assert answer.status == 200
    assert waited[0] == 7
    assert waited[1] == LONGEST_ASKED_S
    assert 0 < waited[2] < 1


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"message": "text"}]},
        {"choices": [{"message": {"content": 3}}]},
        {"choices": [{"message": {"content": None, "tool_calls": [{"function": {}}]}}]},
        {"choices": [{"message": {"content": None, "tool_calls": 7}}]},
    ],
)
def test_an_answer_that_makes_no_sense_is_a_failure_that_shows_it(answer: Any) -> None:
    response, endpoint = asked(always(answer), RESPONSES, {"input": "Hi"})
    assert (response.status, len(endpoint.asked)) == (500, 1)
    assert response.body["_ng_failure_class"] == "bad_answer"


def test_text_that_is_no_json_is_shown() -> None:
    async def reply(path: str, body: Any) -> web.StreamResponse:
        del path, body
        return web.Response(text="<html>some page</html>")

    response, _ = asked(reply, RESPONSES, {"input": "Hi"})
    assert response.status == 500
    assert "not JSON; it answered: <html>some page</html>" in response.body["failure_reason"]


def test_an_answer_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "MAX_ANSWER_BYTES", 1 << 16)

    async def reply(path: str, body: Any) -> web.StreamResponse:
        del path, body

        async def endless() -> Any:
            while True:
                yield b" " * 4096

        return web.Response(body=endless())

    response, _ = asked(reply, RESPONSES, {"input": "Hi"})
    assert response.status == 500
    assert "larger than 65536 bytes" in response.body["failure_reason"]


def test_an_endpoint_that_hangs_costs_its_time_limit_once() -> None:
    async def reply(path: str, body: Any) -> web.StreamResponse:
        del path, body
        await asyncio.sleep(60)
        return web.json_response(completion())

    response, endpoint = asked(reply, RESPONSES, {"input": "Hi"}, request_timeout_s=0.2)
    assert (response.status, len(endpoint.asked)) == (500, 1)
    assert response.body["_ng_failure_class"] == "model_timeout"
    assert "not answered within 0.2 s" in response.body["failure_reason"]


def test_an_endpoint_that_is_not_there_is_told_after_bounded_attempts() -> None:
    async def main() -> None:
        upstream = Upstream([nobody()], {}, QUICK)
        with pytest.raises(UnreachableServer, match="4 attempts") as caught:
            await upstream.post("s", "/responses", {})
        assert caught.value.failure is not None
        assert caught.value.failure.kind == "model_unreachable"
        assert upstream.counts == {"calls": 1, "retries": 3, "failed": 1}
        await upstream.close()

    asyncio.run(main())


def test_a_connection_that_breaks_within_an_answer_is_made_again() -> None:
    broken = [True, True]

    async def reply(path: str, body: Any) -> web.StreamResponse:
        del path, body
        if broken:
            broken.pop()
            half = web.Response(body=b"{")
            half.headers["content-length"] = "1000"
            half.force_close()
            return half
        return web.json_response(completion())

    response, endpoint = asked(reply, RESPONSES, {"input": "Hi"})
    assert (response.status, len(endpoint.asked)) == (200, 3)


def test_a_session_stays_with_its_replica_and_leaves_it_only_while_that_is_down() -> None:
    async def main() -> None:
        endpoints = [Endpoint(always({"at": at})) for at in range(3)]
        async with endpoints[0].serving() as one, endpoints[1].serving() as two:
            upstream = Upstream([one, two, nobody()], {}, QUICK)
            sessions = [f"session {number}" for number in range(30)]
            homes = [int.from_bytes(sha256(one.encode()).digest()[:8], "big") % 3 for one in sessions]
            assert set(homes) == {0, 1, 2}
            for session, home in zip(sessions, homes, strict=True):
                response = [(await upstream.post(session, "/responses", {}))["at"] for _ in range(2)]
                assert response == (
                    [home, home] if home < 2 else [0, 0]
                )  # the third is away: the next one takes its calls
            assert upstream.counts["affinity_lost"] == 2 * homes.count(2)
            assert upstream.counts["failed"] == 0
            await upstream.close()

    asyncio.run(main())


def test_a_replica_that_is_overloaded_hands_over_and_gets_its_sessions_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "DOWN_S", 0.0)

    async def main() -> None:
        ill, well = Endpoint(in_turn((503, {}), (200, {"at": "ill"}))), Endpoint(always({"at": "well"}))
        async with ill.serving() as first, well.serving() as second:
            upstream = Upstream([first, second], {}, QUICK)
            session = next(name for name in map(str, range(99)) if upstream._home(name) == 0)
            assert (await upstream.post(session, "/responses", {}))["at"] == "ill"
            await upstream.close()

    asyncio.run(main())


def test_an_idle_connection_that_was_closed_costs_a_session_nothing() -> None:
    """As a server does whose keep-alive ended a moment before the next call."""
    body = b'{"at": "home"}'
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(head + body)
        await reader.readuntil(b"{}")
        writer.close()

    async def main() -> None:
        other = Endpoint(always({"at": "elsewhere"}))
        server = await asyncio.start_server(once, "127.0.0.1", 0)
        async with server, other.serving() as second:
            upstream = Upstream([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", second], {}, QUICK)
            session = next(name for name in map(str, range(99)) if upstream._home(name) == 0)
            response = [(await upstream.post(session, "/responses", {}))["at"] for _ in range(4)]
            assert response == ["home"] * 4
            assert upstream.counts["retries"] > 0
            assert upstream.counts["affinity_lost"] == 0
            await upstream.close()

    asyncio.run(main())


def test_everything_said_to_an_endpoint_can_be_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "transport.jsonl"
    monkeypatch.setenv("NEMO_GYM_VLLM_TRANSPORT_LOG", str(log))
    asked(in_turn((429, {}), (200, completion())), RESPONSES, {"input": "Hi"})
    lines = [orjson.loads(line) for line in log.read_bytes().splitlines()]
    assert [line["status"] for line in lines] == [429, 200]
    assert "Hi" in lines[0]["request"]
    assert "Hello." in lines[1]["response"]
    assert "tml-test" not in log.read_text()


def test_no_more_calls_are_under_way_than_allowed() -> None:
    running, most = 0, 0

    async def reply(path: str, body: Any) -> web.StreamResponse:
        nonlocal running, most
        del path, body
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return web.json_response({"done": True})

    async def main() -> None:
        async with Endpoint(reply).serving() as url:
            upstream = Upstream([url], {}, CommonSettings(max_concurrent_requests=3))
            await asyncio.gather(*(upstream.post(str(at), "/responses", {}) for at in range(20)))
            await upstream.close()

    asyncio.run(main())
    assert most == 3


def test_a_caller_that_gives_up_takes_its_call_along() -> None:
    async def main() -> None:
        came = asyncio.Event()

        async def reply(path: str, body: Any) -> web.StreamResponse:
            del path, body
            came.set()
            await asyncio.sleep(60)
            return web.json_response({})

        endpoint = Endpoint(reply)
        async with endpoint.serving() as url:
            upstream = Upstream([url], {}, CommonSettings(max_concurrent_requests=1))
            call = asyncio.create_task(upstream.post("s", "/responses", {}))
            await came.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            endpoint.reply = always({"fine": True})
            assert await upstream.post("s", "/responses", {}) == {"fine": True}  # its place was given back
            await upstream.close()

    asyncio.run(main())


def test_errors_name_where_they_come_from() -> None:
    assert (
        str(BadAnswer("http://a/v1", "/responses", "not JSON", b"x"))
        == "http://a/v1/responses: not JSON; it answered: x"
    )
    assert isinstance(BadAnswer("a", "/b", "c", b""), PeerFailed)
