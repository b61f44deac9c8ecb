"""What was answered is never lost, and what failed was never done: a server that is killed, stopped, and full."""

from __future__ import annotations

import json
import resource
import signal
import socket
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.server.episodes.conftest import Api, group, player, ref, say, went_on, whole

HI: list[Any] = [{"role": "user", "content": "Hi"}]
HUGE = {"logprobs": True, "top_logprobs": 20, "max_tokens": 200, "n": 16}
"""5 MB of an answer: more than the system takes for a client that does not read."""


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


@pytest.mark.slow
def test_an_answer_that_never_left_a_killed_server_is_not_trained_on(api: Api) -> None:
    api.register()
    lease = api.claim_one()
    with player(lease) as client:
        seen = say(client, HI)
        with ask_and_never_read(lease, went_on(HI, seen), **HUGE) as request:
            api.server.until(lambda: turns_of(api, lease) == 2)
            api.server.restart()
            assert not read_all(request).endswith(b"}")
        went = say(client, went_on(HI, seen))
        again = say(client, HI)  # was answered before, and is wanted twice
    assert api.end(lease)["status"] == "accepted"
    lines = api.played()[0]["episodes"][0]["trajectories"]
    assert sorted(line["tokens"] for line in lines) == sorted([whole(went), whole(again)])
    assert sum(sum(line["loss_mask"]) for line in lines) == sum(
        len(one.choices[0].token_ids) for one in (seen, went, again)
    )
    api.server.restart()
    assert api.played()[0]["episodes"][0]["trajectories"] == lines


def test_an_answer_that_nobody_waited_for_is_not_trained_on(api: Api) -> None:
    api.register()
    lease = api.claim_one()
    with player(lease) as client:
        ask_and_never_read(lease, HI, max_tokens=8).close()
        api.server.until(lambda: turns_of(api, lease) == 1)  # kept for one who comes back
        answer = say(client, HI)
    assert api.end(lease)["status"] == "accepted"
    (line,) = api.played()[0]["episodes"][0]["trajectories"]
    assert line["tokens"] == whole(answer)


def test_what_was_answered_twice_is_trained_on_twice_whichever_way_it_was_asked_for(api: Api) -> None:
    api.register()
    lease = api.claim_one()
    with player(lease) as client:
        for _ in range(2):
            say(client, HI)
            assert list(say(client, [{"role": "user", "content": "Streamed"}], stream=True))
            client.completions.create(model="policy", prompt="Once", max_tokens=4)
            assert list(client.completions.create(model="policy", prompt="Upon", max_tokens=4, stream=True))
            client.responses.create(model="policy", input="A", max_output_tokens=16)
            assert list(client.responses.create(model="policy", input="Time", max_output_tokens=16, stream=True))
    assert api.end(lease)["status"] == "accepted"
    lines = api.played()[0]["episodes"][0]["trajectories"]
    prompts = [tuple(line["tokens"][: line["loss_mask"].index(1)]) for line in lines]
    assert sorted(Counter(prompts).values()) == [2] * 6


def ask_and_never_read(lease: Any, messages: Any, **options: Any) -> socket.socket:
    """With so little room for the answer that it stays with the server."""
    url = httpx.URL(lease["base_url"])
    body = json.dumps({"model": "policy", "messages": messages, "ignore_eos": True, **options}).encode()
    request = socket.socket()
    request.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    request.connect((url.host, url.port))
    head = f"POST {url.path}/chat/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n"
    head += f"Authorization: Bearer {lease['api_key']}\r\nx-stainless-retry-count: 0\r\n\r\n"
    request.sendall(head.encode() + body)
    return request


def read_all(asked: socket.socket) -> bytes:
    """Of what a server left behind when it died."""
    got = b""
    try:
        while part := asked.recv(65536):
            got += part
    except ConnectionResetError:
        pass
    return got


def turns_of(api: Api, lease: Any) -> int:
    origin = f"{lease['episode_id']}#{lease['attempt']}"
    found = api.server.http(key=api.key).get("/v1/traces", params={"origin": origin}).json()["data"]
    return sum(trace["turn_count"] for trace in found)


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
