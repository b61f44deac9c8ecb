"""Runs that are deleted, quotas of an attempt, and clients that ask for too much."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from palestra.server.broker import claim_rate_limits as rates
from palestra.server.broker.claim_rate_limits import RateLimiter
from tests.server.episodes.conftest import Api, player, ref, say
from tests.server.model_api.conftest import Ephebe, ephebe_in

HI: list[Any] = [{"role": "user", "content": "Hi"}]


def delete(api: Api, run: str = "") -> Any:
    return api.send("DELETE", f"runs/{run or api.run}").json()


# Making


def test_a_run_with_an_unknown_model_is_not_made(alice: Api, bob: Api) -> None:
    name = f"{alice.run}-new"
    refused = alice.send("PUT", f"runs/{name}", {"model": "gpt-9"})
    assert refused.status_code == 400
    assert "model: the model 'gpt-9' does not exist" in refused.json()["detail"]
    assert "ephebe" in refused.json()["detail"]
    assert alice.send("GET", f"runs/{name}").status_code == 404
    assert alice.send("PUT", f"runs/{alice.run}", {"model": "gpt-9"}).status_code == 400
    assert alice.info()["model"] is None
    http = alice.server.http(key=alice.key)
    http.put("/v1/aliases/mine", json={"model": "ephebe"}).raise_for_status()
    assert bob.send("PUT", f"runs/{name}", {"model": "mine"}).status_code == 400  # it is alice's
    assert alice.send("PUT", f"runs/{name}", {"model": "mine"}).json()["model"] == "mine"
    http.delete("/v1/aliases/mine").raise_for_status()
    assert alice.send("PUT", f"runs/{name}", {"model": "mine"}).status_code == 200, "the same call means the same"
    assert alice.send("PUT", f"runs/{name}-too", {"model": "mine"}).status_code == 400


# Deleting


def test_a_deleted_run_takes_all_with_it_and_its_players_are_told(alice: Api, worker: Api, bob: Api) -> None:
    alice.register(size=3)
    lease = worker.claim_one()
    assert (delete(bob, alice.run), worker.send("DELETE", f"runs/{alice.run}").status_code) == ({"deleted": 0}, 403)
    with player(lease) as client, ThreadPoolExecutor(3) as threads:
        call = threads.submit(say, client, HI, max_tokens=2000, extra_body={"ignore_eos": True})
        alice.server.until(lambda: alice.info()["calls_running"] == 1)
        reading = threads.submit(alice.send, "GET", f"runs/{alice.run}/groups", params={"wait_s": 60})
        claim = threads.submit(waiting_claim, worker)
        alice.server.until(lambda: alice.metric("palestra_episode_claims_waiting") == 1)
        assert (delete(alice), delete(alice)) == ({"deleted": 3}, {"deleted": 0})
        with pytest.raises(openai.ConflictError) as given_up:
            call.result(30)
        assert [waits.result(30).status_code for waits in (reading, claim)] == [404, 404]
        with pytest.raises(openai.ConflictError) as refused:
            say(client, HI)
    assert [error.value.code for error in (given_up, refused)] == ["cancelled", "cancelled"]
    assert worker.beat(lease)[0]["reason"] == "cancelled: its run was deleted"
    assert worker.end(lease)["status"] == "cancelled"
    assert alice.run not in {info["run"] for info in alice.get("runs")["runs"]}


def waiting_claim(api: Api) -> Any:
    """Of a kind that is not there."""
    request = {"client_id": "other", "claim_id": "waits", "run": api.run, "kind": "eval", "wait_s": 60}
    return api.send("POST", "claim", request)


def test_a_name_begins_anew_without_the_tokens_of_before(alice: Api) -> None:
    alice.register()
    old = alice.claim_one()
    with player(old) as client:
        say(client, HI)
    alice.end(old)
    assert delete(alice) == {"deleted": 1}
    alice.put_run()
    alice.register()
    new = alice.claim_one()
    assert (new["attempt"], new["episode_id"] != old["episode_id"]) == (1, True)
    assert alice.end(new, reward=0.0)["status"] == "accepted"
    assert alice.end(old)["status"] == "repeated"
    (group,) = alice.played()
    assert (group["number"], [one["trajectories"] for one in group["episodes"]]) == (1, [[]])


# Quotas


@pytest.mark.parametrize(
    ("quota", "words"), [({"max_calls": 1}, "max_calls: this attempt has 1"), ({"max_sampled_tokens": 4}, "has 6")]
)
def test_an_attempt_that_used_up_its_quota_can_only_end(alice: Api, quota: dict[str, Any], words: str) -> None:
    alice.put_run(**quota)
    alice.register()
    lease = alice.claim_one()
    with player(lease, max_retries=3) as client:
        say(client, HI, extra_body={"ignore_eos": True})
        with pytest.raises(openai.RateLimitError) as refused:
            say(client, HI)
    assert (refused.value.code, words in refused.value.message) == ("quota_exceeded", True)
    assert refused.value.response.headers["x-should-retry"] == "false"
    info = alice.episode(lease["episode_id"])
    assert (info["calls"], info["sampled_tokens"]) == (1, 6)
    assert alice.end(lease)["status"] == "accepted"
    assert sum(alice.played()[0]["episodes"][0]["trajectories"][0]["loss_mask"]) == 6


def test_quotas_are_each_attempts_own(alice: Api) -> None:
    alice.put_run(max_calls=1, backoff_s=0.0)
    alice.register()
    for _ in range(2):
        lease = alice.claim_one()
        with player(lease) as client:
            say(client, HI)
        alice.post("release", client_id="player", leases=[ref(lease)])
    answer = alice.send("PUT", f"runs/{alice.run}", {"settings": {"max_calls": -1}})
    assert (answer.status_code, "max_calls must be 0 or more" in answer.json()["detail"]) == (400, True)


# Floods


@pytest.fixture(scope="module")
def slow_claims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ephebe]:
    server = ephebe_in(tmp_path_factory.mktemp("rates"), "episodes.max_claims_per_s=0.01", "episodes.max_leases=2")
    with server:
        server.start()
        yield server


@pytest.mark.slow
def test_a_client_that_floods_is_held_off_and_the_others_are_served(slow_claims: Ephebe) -> None:
    greedy, modest = Api(slow_claims, client_id="greedy"), Api(slow_claims, client_id="modest")
    modest.run = greedy.run
    greedy.put_run()
    greedy.register(size=4)
    assert len(greedy.claim(max_n=4)) == 2  # all that it may hold
    refused = [greedy.send("POST", "claim", {"client_id": "greedy", "claim_id": f"{n}"}) for n in range(5)]
    assert {answer.status_code for answer in refused} == {429}
    assert all(0 < float(answer.headers["retry-after"]) <= 100 for answer in refused)
    assert "at most 0.01 in a second" in refused[0].json()["detail"]
    assert len(modest.claim(max_n=2)) == 2


def test_the_pace_is_each_clients_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "MAX_KNOWN", 2)
    pace = RateLimiter(2.0)
    assert [pace.wait_s("a", now) for now in (0.0, 0.0, 0.0, 0.25, 0.5, 0.5)] == [0.0, 0.0, 0.5, 0.25, 0.0, 0.5]
    assert pace.wait_s("b", 0.5) == 0.0
    assert pace.wait_s("a", -100.0) > 0  # a clock that was set back gives nothing away
    assert [pace.wait_s(who, 0.0) for who in "cd"] == [0.0, 0.0]
    assert len(pace._buckets) == 2
    assert [RateLimiter(None).wait_s("a", 0.0) for _ in range(9)] == [0.0] * 9
