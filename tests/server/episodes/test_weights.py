"""Weights that change while episodes are played, and pauses for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.server.conftest import created
from tests.server.episodes.conftest import Api, player, say, went_on, whole
from tests.server.model_api.conftest import MODEL

HI: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def sessions(keyed: Any, keys: dict[str, str]) -> Iterator[list[str]]:
    """Sampling sessions of two versions of a policy in training: alice's."""
    service = keyed.client(key=keys["alice"])
    model = service.create_lora_training_client(base_model=MODEL, rank=4)
    samplers = [created(model.save_weights_and_get_sampling_client()) for _ in range(2)]
    yield [sampler._sampling_session_id for sampler in samplers]
    service.close("success").result()


def test_a_conversation_goes_on_while_the_weights_change(alice: Api, sessions: list[str]) -> None:
    """Token for token, and it is known which token is whose."""
    alice.put_run(model=MODEL)
    alice.register()
    lease = alice.claim_one()
    messages, answers = HI, []
    with player(lease) as client:
        for version, session in enumerate([MODEL, *sessions]):
            if version:
                assert alice.of_run("weights", version=version, model=session)["version"] == version
            answers.append(say(client, messages))
            messages = went_on(messages, answers[-1])
    alice.end(lease)
    (episode,) = alice.played()[0]["episodes"]
    (line,) = episode["trajectories"]
    assert line["tokens"] == whole(answers[-1])
    for version, answer in enumerate(answers):
        start, end = len(answer.prompt_token_ids), len(whole(answer))
        assert line["versions"][start:end] == [version] * (end - start)
    trace = alice.server.http(key=alice.key).get(f"/v1/traces/{line['trace_id']}").json()
    assert [turn["version"] for turn in trace["turns"]] == [0, 1, 2]
    assert len({turn["weights"] for turn in trace["turns"]}) == 3
    info = episode["info"]
    assert (info["version"], info["oldest_version"], info["calls"]) == (0, 0, 3)


def publish(api: Api, version: int) -> Any:
    return api.of_run("weights", version=version, model=MODEL)


def test_versions_only_rise(alice: Api) -> None:
    publish(alice, 3)
    assert publish(alice, 3)["version"] == 3
    answer = alice.send("POST", f"runs/{alice.run}/weights", {"version": 2, "model": MODEL})
    assert (answer.status_code, "versions only rise" in answer.json()["detail"]) == (409, True)


def test_at_most_so_many_versions_behind(alice: Api) -> None:
    alice.put_run(weight_policy="lag", max_lag=1, backoff_s=0.0)
    alice.register()
    lease = alice.claim_one()
    with player(lease) as client:
        say(client, HI)
        publish(alice, 1)
        say(client, HI)
        assert alice.beat(lease)[0]["can_continue"]
        publish(alice, 2)
        with pytest.raises(openai.ConflictError) as refused:
            say(client, HI)
    assert refused.value.code == "stale_weights"
    (beat,) = alice.beat(lease)
    assert (beat["can_continue"], beat["reason"].partition(":")[0]) == (False, "stale_weights")
    assert alice.end(lease)["status"] == "stale"
    again = alice.claim_one(wait_s=5)
    assert (again["attempt"], again["version"]) == (2, 2)


def test_a_call_under_way_is_given_up_when_its_weights_may_not_answer(alice: Api) -> None:
    alice.put_run(weight_policy="drop", backoff_s=0.0)
    alice.register()
    lease = alice.claim_one()
    with player(lease) as client, ThreadPoolExecutor(1) as thread:
        long = thread.submit(say, client, HI, max_tokens=2000, extra_body={"ignore_eos": True})
        alice.server.until(lambda: alice.info()["calls_running"] == 1)
        publish(alice, 1)
        with pytest.raises(openai.ConflictError) as refused:
            long.result(30)
    assert refused.value.code == "stale_weights"


def test_what_is_too_stale_when_it_is_read_is_dropped(alice: Api) -> None:
    alice.put_run(weight_policy="lag", max_lag=0)
    for name in ("old", "new"):
        alice.register(name)
        lease = alice.claim_one()
        with player(lease) as client:
            say(client, HI)
        alice.end(lease)
        publish(alice, {"old": 1, "new": 2}[name])
    assert [(one["group_id"], one["state"]) for one in alice.played(version=1)] == [
        ("old", "dropped"),
        ("new", "ready"),
    ]
    assert alice.played(after=0, limit=1)[0]["reason"].startswith("stale_weights")


def test_a_call_of_a_paused_run_is_held(alice: Api) -> None:
    alice.register()
    lease = alice.claim_one(lease_s=1)
    assert alice.of_run("pause")["is_paused"]
    alice.register("later")
    assert alice.claim() == []
    with player(lease) as client, ThreadPoolExecutor(1) as thread:
        held = thread.submit(say, client, HI)
        with pytest.raises(TimeoutError):
            held.result(1.2)  # longer than the lease, which does not age
        assert alice.info()["calls_running"] == 0
        publish(alice, 1)
        alice.of_run("resume")
        answer = held.result(20)
    assert alice.end(lease)["status"] == "accepted"
    (line,) = alice.played()[0]["episodes"][0]["trajectories"]
    assert (line["tokens"], set(line["versions"])) == (whole(answer), {0, 1})  # what is read has none


@pytest.mark.parametrize("keep_keys", [pytest.param(False, marks=pytest.mark.slow), True], ids=["recompute", "keep"])
def test_a_call_goes_on_with_newer_weights_between_two_tokens(
    alice: Api, bob: Api, sessions: list[str], keep_keys: bool
) -> None:
    """In the trajectory each token has the version that sampled it; the trace names the weights too."""
    before, after = sessions
    http = alice.server.http(key=alice.key)
    alice.put_run()
    alice.of_run("weights", version=4, model=before)
    alice.register()
    lease = alice.claim_one()
    with player(lease) as client:
        options = {"max_tokens": 400, "extra_body": {"min_tokens": 400}, "stream": True}
        answer = say(client, HI, **options)
        next(answer)
        alice.of_run("weights", version=5, model=after)
        body = {"sampling_session_ids": [before], "to": after, "keep_keys": keep_keys}
        assert bob.server.http(key=bob.key).post("/api/v1/continue_samples", json=body).status_code == 404
        assert http.post("/api/v1/continue_samples", json=body).json() == {"changed": 1}
        for _ in answer:
            pass
    alice.end(lease)
    (line,) = alice.played()[0]["episodes"][0]["trajectories"]
    versions = [v for v, m in zip(line["versions"], line["loss_mask"], strict=True) if m]
    assert versions == sorted(versions)
    assert (set(versions), len(versions)) == ({4, 5}, 400)
    # Equal weights under another name: nothing had to be computed anew, and nothing is mixed.
    assert not line.get("inexact_mask")
    trace = http.get(f"/v1/traces/{line['trace_id']}").json()
    (turn,) = trace["turns"]
    (segment,) = turn["segments"][0]
    assert (segment["start"], segment["version"]) == (versions.index(5), 5)
    assert segment["weights"] != turn["weights"]
