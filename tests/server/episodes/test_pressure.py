"""Claims that are held off: by a full engine, by a client's share. They come back, and nobody else waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from palestra.server.broker import backpressure as pressure
from palestra.server.broker.backpressure import Backpressure
from tests.server.episodes.conftest import Api, player, say
from tests.server.model_api.conftest import Ephebe, ephebe_in

HI: list[Any] = [{"role": "user", "content": "Hi"}]
ENDLESS: dict[str, Any] = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ephebe]:
    """It samples one answer at a time."""
    limits = ("models.0.max_sample_rows=1", "episodes.max_calls_waiting=1")
    server = ephebe_in(tmp_path_factory.mktemp("small"), *limits)
    with server:
        server.start()
        yield server


def ask(api: Api, **fields: Any) -> Any:
    request = {"client_id": api.client_id, "claim_id": "x", "run": api.run}
    return api.post("claim", **request | fields)


def test_nothing_is_claimed_while_the_engine_is_full(small: Ephebe) -> None:
    api = Api(small)
    api.put_run(model="ephebe")
    api.register(size=6)
    leases = api.claim("first", max_n=4)
    with ThreadPoolExecutor(5) as threads:
        calls = [threads.submit(say, player(lease), HI, **ENDLESS) for lease in leases]
        small.until(lambda: api.info()["held"].startswith("engine_full: "))
        answer = ask(api)
        assert answer["leases"] == []
        assert "model calls wait for ephebe, more than 1 (episodes.max_calls_waiting)" in answer["reason"]
        assert ask(api, run=None, claim_id="y")["reason"] == answer["reason"]
        assert len(api.claim("first", max_n=4)) == 4  # what was claimed is claimed
        assert all(beat["can_continue"] for beat in api.beat(*leases))
        claim = threads.submit(ask, api, claim_id="z", wait_s=60)
        small.until(lambda: api.metric("palestra_episode_claims_waiting") == 1)
        assert [api.end(lease)["status"] for lease in leases] == ["accepted"] * 4
        assert len(claim.result(30)["leases"]) == 1
        for call in calls:
            with pytest.raises(openai.APIError):
                call.result(30)
    assert api.info()["held"] == ""


def test_an_engine_with_room_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "FRESH_S", 0.0)
    monkeypatch.setattr(pressure, "LOOK_S", 0.001)

    async def work() -> None:
        waiting, rooms = {"a": 3, "b": 0}, list[set[str]]()
        full = Backpressure(2, lambda: waiting)
        assert full.full().keys() == {"a"}
        waiting["b"] = 3
        assert full.full().keys() == {"a", "b", ""}  # whichever it will be, it is full
        came = asyncio.Event()

        def on_room() -> None:
            rooms.append({*full.full()})
            came.set()
            if len(rooms) == 1:
                raise RuntimeError("the next time counts all the same")

        watching = asyncio.create_task(full.watch(on_room))
        for name, left in (("b", {"a"}), ("a", set[str]())):
            waiting[name] = 2
            await asyncio.wait_for(came.wait(), 10)
            came.clear()
            assert rooms[-1] == left
        waiting["a"] = 3
        full.full()
        waiting["a"] = 0  # before anybody looked
        await asyncio.wait_for(came.wait(), 10)
        watching.cancel()

    asyncio.run(work())


def test_it_can_be_switched_off() -> None:
    async def work() -> None:
        full = Backpressure(None, lambda: {"a": 10**6})
        assert full.full() == {}

    asyncio.run(work())


def test_a_client_at_its_share_holds_up_nobody(alice: Api) -> None:
    alice.put_run(client_share=0.5)
    alice.register(size=2, count=4)
    mine = alice.claim(max_n=4)
    assert len(mine) == 2
    response = ask(alice, claim_id="more")
    assert "client_share of 0.5 allows" in response["reason"]
    with ThreadPoolExecutor(2) as threads:
        claims = [threads.submit(alice.claim, client_id="player", wait_s=30)]
        alice.server.until(lambda: alice.metric("palestra_episode_claims_waiting") == 1)
        alice.put_run(client_share=0.5, backoff_s=0.0)
        other = Api(alice.server, alice.key, alice.run, "other")
        theirs = other.claim(max_n=4)
        assert len(theirs) == 2
        claims.append(threads.submit(other.claim, client_id="third", wait_s=30))
        alice.server.until(lambda: alice.metric("palestra_episode_claims_waiting") == 2)
        back = [{"episode_id": theirs[0]["episode_id"], "attempt": theirs[0]["attempt"]}]
        other.post("release", client_id="other", leases=back)
        assert len(claims[1].result(30)) == 1  # it came later, and is served
        assert not claims[0].done()
        alice.post("release", client_id="player", leases=[{"episode_id": mine[0]["episode_id"], "attempt": 1}])
        assert [lease["episode_id"] for lease in claims[0].result(30)] == [mine[0]["episode_id"]]
