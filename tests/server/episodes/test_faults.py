"""What was answered is never lost, and what failed was never done: a server that is killed, stopped, and full.

The tests share a server and leave it running; the last one stops it.
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.server.episodes.conftest import Api, group, player, ref, say, went_on, whole
from tests.server.openai.conftest import Ephebe, _make

HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def frail(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ephebe]:
    server = _make(tmp_path_factory.mktemp("frail"), "episodes.hold_calls_s=0.1")
    with server:
        server.start()
        yield server


@pytest.fixture
def api(frail: Ephebe) -> Api:
    api = Api(frail)
    api.put_run()
    return api


def test_a_pause_that_lasts_asks_to_come_back(api: Api) -> None:
    api.register()
    lease = api.claim_one()
    api.of_run("pause")
    with player(lease) as client:
        with pytest.raises(openai.InternalServerError) as refused:
            say(client, HI)
        assert (refused.value.status_code, refused.value.code) == (503, "paused")
        assert float(refused.value.response.headers["retry-after"]) > 0
        api.of_run("resume")
        say(client, HI)


@pytest.mark.parametrize("kills", ["some", pytest.param("all", marks=pytest.mark.slow)])
def test_a_server_killed_between_any_two_steps_goes_on_as_if_nothing_was(api: Api, kills: str) -> None:
    def kill(after: str) -> None:
        if kills == "all" or after in ("claim", "first call", "end"):
            api.server.restart()

    api.register(size=2)
    kill("register")
    leases = api.claim(f"only-{kills}", max_n=2)
    kill("claim")
    again = api.claim(f"only-{kills}", max_n=2)
    assert [one["api_key"] for one in again] == [one["api_key"] for one in leases]
    first, other = again
    with player(first) as client:
        begun = say(client, HI)
    assert api.end(other, reward=0.25)["status"] == "accepted"
    kill("first call")
    with player(first) as client:
        went = say(client, went_on(HI, begun))
    assert went.prompt_token_ids[: len(whole(begun))] == whole(begun)
    assert went.trace_id == begun.trace_id
    assert api.end(other, reward=0.25)["status"] == "repeated"
    own = Api(api.server, other["api_key"])
    assert own.post("end", ends=[ref(other) | {"result": {"reward": 0.5}}])["ended"][0]["status"] == "conflict"
    kill("second call")
    assert api.end(first, reward=0.75)["status"] == "accepted"
    kill("end")
    groups = api.played()
    ((line,), nothing) = (one["trajectories"] for one in groups[0]["episodes"])
    assert (line["tokens"], nothing) == (whole(went), [])
    kill("read")
    assert api.played() == groups
    assert api.of_run("commit", cursor=1)["committed"] == 1
    kill("commit")
    assert api.played(wait_s=0) == []
    assert api.end(first, reward=0.75)["status"] == "repeated"
    assert api.of_run("groups", groups=[group(size=2)])["groups"][0]["is_committed"]


def test_a_call_and_a_claim_that_a_kill_interrupts_can_be_made_again(api: Api) -> None:
    api.register()
    lease = api.claim_one()
    with player(lease) as client, ThreadPoolExecutor(2) as threads:
        call = threads.submit(say, client, HI, max_tokens=2000, extra_body={"ignore_eos": True})
        claim = threads.submit(api.claim, "waits", wait_s=60)
        api.server.until(lambda: api.episode(lease["episode_id"])["calls"] == 1)
        api.server.kill()
        with pytest.raises(openai.APIConnectionError):
            call.result(20)
        with pytest.raises(httpx.HTTPError):
            claim.result(20)
        api.server.start()
        answer = say(client, HI)
    assert api.claim("waits") == []
    assert api.end(lease)["status"] == "accepted"
    (line,) = api.played()[0]["episodes"][0]["trajectories"]
    assert line["tokens"] == whole(answer)  # of the call that was never answered nothing is left


def test_a_full_disk_refuses_and_forgets_nothing(api: Api) -> None:
    api.register(size=2)
    (lease,) = api.claim("before")
    process = psutil.Process(api.server.pid)
    process.rlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    try:
        refused = [
            api.send("POST", f"runs/{api.run}/groups", {"groups": [group("more")]}),
            api.send("POST", "claim", {"client_id": "player", "claim_id": "full", "run": api.run}),
            api.send("POST", "end", {"client_id": "player", "ends": [ref(lease) | {"result": {"reward": 1.0}}]}),
        ]
    finally:
        process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    for answer in refused:
        assert (answer.status_code, float(answer.headers["retry-after"]) > 0) == (503, True), answer.text
    api.server.until(lambda: api.send("GET", "runs").status_code == 200)
    info = api.info()
    assert (info["queued"], info["leased"], info["ended"]) == (1, 1, 0)
    assert api.claim("before")[0]["api_key"] == lease["api_key"]
    with player(lease) as client:
        answer = say(client, HI)
    (other,) = api.claim("full")
    assert other["attempt"] == 1
    assert [api.end(one)["status"] for one in (lease, other)] == ["accepted", "accepted"]
    episodes = api.played()[0]["episodes"]
    assert [line["tokens"] for line in episodes[0]["trajectories"]] == [whole(answer)]
    assert api.register("more")


def test_a_server_that_did_not_run_lets_no_lease_expire(api: Api) -> None:
    """A laptop that slept, a machine that was stopped: no client could beat meanwhile."""
    api.register()
    lease = api.claim_one(lease_s=2.5)
    process = psutil.Process(api.server.pid)
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    process.send_signal(signal.SIGCONT)
    assert api.beat(lease)[0]["can_continue"]
    assert api.end(lease)["status"] == "accepted"


def test_a_server_that_stops_sends_waiters_home(api: Api) -> None:
    with ThreadPoolExecutor(2) as threads:
        claim, reading = threads.submit(api.claim, wait_s=60), threads.submit(api.played, wait_s=60)
        api.server.until(lambda: api.metric("palestra_episode_claims_waiting") == 1)
        assert api.server.stop() == 0
        assert claim.result(20) == []
        assert reading.result(20) == []
