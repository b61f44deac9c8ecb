"""An episode from its registration to its trainer, played by official SDKs: reward and tokens of one attempt."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from tests.server.episodes.conftest import Api, player, ref, say, went_on, whole
from tests.server.standstill import standstill

TWO: list[Any] = [{"role": "user", "content": "What is 1 + 1?"}]


def test_what_was_played_is_delivered_token_for_token(alice: Api) -> None:
    alice.register(size=2, tags={"level": "easy"})
    leases = alice.claim(max_n=2)
    assert [(one["run"], one["group_id"], one["index"], one["tags"]) for one in leases] == [
        (alice.run, "g", 0, {"level": "easy"}),
        (alice.run, "g", 1, {"level": "easy"}),
    ]
    talks = []
    for lease in leases:
        with player(lease) as client:
            first = say(client, lease["task"]["prompt"], temperature=0.5)
            second = say(client, went_on(lease["task"]["prompt"], first))
        assert second.prompt_token_ids[: len(whole(first))] == whole(first)
        talks.append((first, second))
        assert alice.end(lease, reward=float(lease["index"]), metrics={"turns": 2})["status"] == "accepted"
    (group,) = alice.played()
    assert (group["number"], group["state"], group["kind"]) == (1, "ready", "train")
    assert [one["info"]["result"]["reward"] for one in group["episodes"]] == [0.0, 1.0]
    for episode, (first, second) in zip(group["episodes"], talks, strict=True):
        (line,) = episode["trajectories"]
        assert line["tokens"] == whole(second)
        start, end = len(first.prompt_token_ids), len(whole(first))
        after = len(second.prompt_token_ids)
        drawn = [*range(start, end), *range(after, len(line["tokens"]))]
        assert [i for i, counts in enumerate(line["loss_mask"]) if counts] == drawn
        assert [line["temperatures"][i] for i in drawn] == [0.5] * (end - start) + [1.0] * (len(drawn) - end + start)
        assert line["trace_id"] == first.trace_id == second.trace_id
        assert (episode["info"]["calls"], episode["info"]["attempt"]) == (2, 1)


def test_its_traces_stay_readable_by_the_owner_and_by_nobody_else(alice: Api, bob: Api) -> None:
    alice.register()
    lease = alice.claim_one()
    with player(lease) as client:
        answer = say(client, TWO)
    alice.end(lease)
    path = f"/v1/traces/{answer.trace_id}"
    trace = alice.server.http(key=alice.key).get(path).json()
    assert trace["origin"] == f"{lease['episode_id']}#1"
    assert (trace["turns"][0]["version"], trace["turns"][0]["prompt"]) == (0, answer.prompt_token_ids)
    listed = alice.server.http(key=alice.key).get("/v1/traces", params={"origin": trace["origin"]}).json()
    assert [one["id"] for one in listed["data"]] == [answer.trace_id]
    assert alice.server.http(key=bob.key).get(path).status_code == 404
    assert alice.server.http(key=lease["api_key"]).get(path).status_code == 403


def test_every_dialect_is_of_the_attempt_and_answered_by_the_runs_model(alice: Api) -> None:
    import anthropic

    alice.put_run(model="ephebe")
    alice.register()
    lease = alice.claim_one()
    with player(lease) as client:
        assert [model.id for model in client.models.list()] == ["ephebe"]
        said = [say(client, TWO, model="gpt-9").trace_id]
        said.append(client.completions.create(model="x", prompt="Hello", max_tokens=3).trace_id)  # type: ignore[attr-defined]
        said.append(client.responses.create(model="x", input="Hello", max_output_tokens=3).trace_id)  # type: ignore[attr-defined]
        streamed = list(client.chat.completions.create(model="x", messages=TWO, max_tokens=3, stream=True))
        assert streamed
        list(client.completions.create(model="x", prompt="Hi", max_tokens=3, stream=True))
    url = lease["base_url"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=lease["api_key"], max_retries=0) as claude:
        claude.messages.create(model="x", max_tokens=3, messages=TWO)
        assert claude.messages.count_tokens(model="x", messages=TWO).input_tokens > 0
    alice.end(lease)
    (episode,) = alice.played()[0]["episodes"]
    assert episode["info"]["calls"] == 6
    traces = {line["trace_id"] for line in episode["trajectories"]}
    assert set(said) <= traces
    assert sum(sum(line["loss_mask"]) > 0 for line in episode["trajectories"]) == 6


def test_equal_calls_of_two_attempts_share_nothing(alice: Api) -> None:
    """Members of a group begin with the same words."""
    alice.register(size=2)
    leases = alice.claim(max_n=2)
    first, second = (say(player(lease), TWO, temperature=0) for lease in leases)
    assert whole(first) == whole(second)
    assert first.trace_id != second.trace_id
    for lease, answer in zip(leases, (first, second), strict=True):
        more = say(player(lease), went_on(TWO, answer))
        assert more.trace_id == answer.trace_id
        alice.end(lease)
    (group,) = alice.played()
    assert [len(one["trajectories"]) for one in group["episodes"]] == [1, 1]


def test_a_retry_of_one_attempt_is_not_answered_with_anothers_call(alice: Api) -> None:
    alice.register(size=2)
    left, retried = alice.claim(max_n=2)
    body = {"model": "x", "messages": TWO, "max_tokens": 24, "ignore_eos": True}
    headers = {"x-stainless-retry-count": "0"}
    http = alice.server.http(key=left["api_key"])
    with standstill(alice.server), pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=body, headers=headers, timeout=httpx.Timeout(30, read=0.3))
    headers["x-stainless-retry-count"] = "1"
    answer = alice.server.http(key=retried["api_key"]).post("/v1/chat/completions", json=body, headers=headers).json()
    trace = alice.server.http(key=alice.key).get(f"/v1/traces/{answer['trace_id']}").json()
    assert trace["origin"] == f"{retried['episode_id']}#1"


def test_several_agents_in_one_episode_are_told_apart(alice: Api) -> None:
    alice.register()
    lease = alice.claim_one()
    with player(lease) as client:
        for agent in ("solver", "critic"):
            say(client, [{"role": "system", "content": agent}, *TWO], metadata={"agent": agent})
    alice.end(lease, agent_rewards={"solver": 1.0, "critic": 0.0})
    (episode,) = alice.played()[0]["episodes"]
    assert [line["agent"] for line in episode["trajectories"]] == ["solver", "critic"]


def test_calls_on_the_side_and_of_sub_agents_are_branches_of_their_own(alice: Api) -> None:
    """As command-line agents make them: a title without tools, and a sub-agent that is named in a header."""
    alice.register()
    lease = alice.claim_one()
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with player(lease) as client:
        say(client, [{"role": "system", "content": "Write a title."}, *TWO])
        say(client, TWO, tools=tools)
        say(
            client,
            [{"role": "system", "content": "Help."}, *TWO],
            tools=tools,
            extra_headers={"x-openai-subagent": "review"},
        )
    alice.end(lease, agent_rewards={"review": 0.5, "side": 0.0})
    ((episode,),) = [group["episodes"] for group in alice.played()]
    assert [line["agent"] for line in episode["trajectories"]] == ["", "side", "review"]
    calls = alice.get(f"episodes/{lease['episode_id']}/timeline")["attempts"][0]["calls"]
    assert [call["agent"] for call in calls] == ["side", "", "review"]


def test_an_agent_that_compacts_its_context_makes_branches_that_are_all_trained(alice: Api) -> None:
    """It asks for a summary at the end of its conversation, and begins another one with it."""
    alice.register()
    lease = alice.claim_one()
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    with player(lease) as client:
        first = say(client, TWO, tools=tools)
        talk = went_on(TWO, first)
        second = say(client, talk, tools=tools)
        summary = say(client, went_on(talk, second), tools=tools)
        rest = say(client, [{"role": "user", "content": "So far: one look."}], tools=tools)
        last = say(client, went_on([{"role": "user", "content": "So far: one look."}], rest), tools=tools)
    alice.end(lease)
    ((episode,),) = [group["episodes"] for group in alice.played()]
    main, after = episode["trajectories"]
    assert (main["tokens"], after["tokens"]) == (whole(summary), whole(last))
    assert [line["agent"] for line in (main, after)] == ["", ""]  # kept by agent.train_on=[continuations]
    conversations = ((first, second, summary), (rest, last))
    sampled = [sum(len(one.choices[0].token_ids) for one in turns) for turns in conversations]
    assert [sum(line["loss_mask"]) for line in (main, after)] == sampled


def test_text_completions_that_go_on_are_one_trajectory(alice: Api) -> None:
    alice.register()
    lease = alice.claim_one()
    with player(lease) as client:
        options: Any = {"model": "x", "max_tokens": 4, "extra_body": {"return_token_ids": True}}
        first: Any = client.completions.create(prompt="One, two,", **options).choices[0]
        second: Any = client.completions.create(prompt=[*first.prompt_token_ids, *first.token_ids], **options)
    alice.end(lease)
    (line,) = alice.played()[0]["episodes"][0]["trajectories"]
    assert line["tokens"] == [*first.prompt_token_ids, *first.token_ids, *second.choices[0].token_ids]
    assert sum(line["loss_mask"]) == len(first.token_ids) + len(second.choices[0].token_ids)


def test_a_key_opens_nothing_after_the_end(alice: Api) -> None:
    alice.register()
    lease = alice.claim_one()
    assert alice.end(lease)["status"] == "accepted"
    with player(lease) as client, pytest.raises(openai.AuthenticationError) as refused:
        say(client, TWO)
    assert refused.value.code == "invalid_api_key"
    forged = lease | {"api_key": "ep-" + "A" * 43}
    with player(forged) as client, pytest.raises(openai.AuthenticationError):
        say(client, TWO)


def test_an_end_is_repeated_safely_and_never_changed(alice: Api) -> None:
    alice.register()
    lease = alice.claim_one()
    assert alice.end(lease, reward=0.5)["status"] == "accepted"
    assert alice.end(lease, reward=0.5)["status"] == "repeated"
    assert alice.end(lease, reward=0.7)["status"] == "conflict"
    assert alice.played()[0]["episodes"][0]["info"]["result"]["reward"] == 0.5
    alice.of_run("commit", cursor=1)
    assert alice.end(lease, reward=0.5)["status"] == "repeated"
    assert alice.send("GET", f"episodes/{lease['episode_id']}").status_code == 404


def test_the_attempts_own_key_speaks_for_it_alone(alice: Api) -> None:
    alice.register(size=2)
    mine, other = alice.claim(max_n=2)
    own = Api(alice.server, mine["api_key"])
    beats = own.post("heartbeat", leases=[ref(mine)])["beats"]
    assert [(beat["can_continue"], beat["reason"]) for beat in beats] == [(True, "")]
    for path, body in (
        ("heartbeat", {"leases": [ref(other)]}),
        ("end", {"ends": [ref(other) | {"result": {"reward": 1.0}}]}),
        ("release", {"leases": [ref(mine) | {"attempt": 2}]}),
        ("claim", {"client_id": "x", "claim_id": "y"}),
        ("cancel", {"run": alice.run, "group_ids": ["g"]}),
    ):
        assert own.send("POST", path, body).status_code == 403, path
    ends = [ref(mine) | {"result": {"reward": 1.0}}]
    assert own.post("end", ends=ends)["ended"][0]["status"] == "accepted"
    assert own.post("end", ends=ends)["ended"][0]["status"] == "repeated"  # its answer may have been lost


def test_a_lease_that_is_lost_is_fenced_off(alice: Api) -> None:
    """The late one's tokens and reward come to nothing."""
    alice.put_run(backoff_s=0.0)
    alice.register()
    first = alice.claim_one(lease_s=3)
    with player(first) as client:
        lost = say(client, TWO)
    second = alice.claim_one(wait_s=30)
    assert (second["episode_id"], second["attempt"]) == (first["episode_id"], 2)
    assert second["api_key"] != first["api_key"]
    tries: list[Any] = []
    http = openai.DefaultHttpxClient(event_hooks={"request": [tries.append]})
    with player(first, max_retries=5, http_client=http) as client, pytest.raises(openai.ConflictError) as refused:
        say(client, TWO)
    assert refused.value.code == "lease_lost"
    assert len(tries) == 1, "the SDK must not try again"
    (beat,) = alice.beat(first)
    assert not beat["can_continue"]
    assert beat["reason"].startswith("lease_lost: expired")
    assert alice.end(first, reward=100.0)["status"] == "lease_lost"
    with player(second) as client:
        kept = say(client, TWO)
    assert alice.end(second, reward=1.0)["status"] == "accepted"
    (episode,) = alice.played()[0]["episodes"]
    assert (episode["info"]["attempt"], episode["info"]["result"]["reward"]) == (2, 1.0)
    assert [line["trace_id"] for line in episode["trajectories"]] == [kept.trace_id]
    assert lost.trace_id != kept.trace_id
    assert [loss["reason"].partition(":")[0] for loss in episode["info"]["losses"]] == ["expired"]


def test_a_lease_lives_on_beats_and_on_calls(alice: Api) -> None:
    alice.register(size=2)
    beaten, called = alice.claim(max_n=2, lease_s=2)
    until = time.monotonic() + 2.5
    with player(called) as client:
        while time.monotonic() < until:
            assert alice.beat(beaten)[0]["can_continue"]
            say(client, TWO, max_tokens=1)
            time.sleep(0.1)
    assert [alice.end(lease)["status"] for lease in (beaten, called)] == ["accepted", "accepted"]


def test_a_cancelled_episode_ends_its_call_at_once(alice: Api) -> None:
    alice.register()
    lease = alice.claim_one()
    with player(lease) as client:
        stream = client.chat.completions.create(
            model="x", messages=TWO, max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        assert alice.post("cancel", run=alice.run, group_ids=["g"], reason="enough")["cancelled"] == 1
        with pytest.raises(openai.APIError) as refused:
            list(stream)
        assert refused.value.code == "cancelled"
        with pytest.raises(openai.ConflictError):
            say(client, TWO)
    assert alice.end(lease)["status"] == "cancelled"
    (group,) = alice.played()
    assert (group["state"], group["episodes"]) == ("dropped", [])
    queue = 'palestra_queue_depth{base_model="ephebe",kind="sample"} 0.0'
    alice.server.until(lambda: queue in alice.metrics())  # and nothing is sampled for it any more


def test_what_is_released_is_played_by_another(alice: Api, worker: Api) -> None:
    alice.put_run(backoff_s=0.0)
    alice.register()
    lease = worker.claim_one()
    (beat,) = worker.post("release", client_id="player", leases=[ref(lease)], reason="shutting down")["beats"]
    assert not beat["can_continue"]
    again = alice.claim_one(wait_s=5)
    assert (again["episode_id"], again["attempt"]) == (lease["episode_id"], 2)
    assert alice.episode(lease["episode_id"])["losses"][0]["reason"] == "released: shutting down"


def test_a_lost_answer_to_a_claim_costs_nothing(alice: Api) -> None:
    alice.register(size=3)
    first = alice.claim("again", max_n=2)
    assert len(first) == 2
    second = alice.claim("again", max_n=2)
    for lease in (*first, *second):
        lease.pop("expires_at")
    assert first == second


def test_a_failure_is_a_result(alice: Api) -> None:
    alice.register()
    lease = alice.claim_one()
    error = {"type": "ToolError", "message": "no such file"}
    ends = [ref(lease) | {"result": {"error": error}}]
    assert alice.post("end", client_id="player", ends=ends)["ended"][0]["status"] == "accepted"
    (episode,) = alice.played()[0]["episodes"]
    assert (episode["info"]["result"]["error"], episode["info"]["result"]["reward"]) == (error, None)


def test_a_cursor_reads_again_until_it_is_committed(alice: Api) -> None:
    for name in ("a", "b", "c"):
        alice.register(name)
        alice.end(alice.claim_one())
    assert [one["group_id"] for one in alice.played(limit=2)] == ["a", "b"]
    assert [one["number"] for one in alice.played(after=1)] == [2, 3]
    assert [one["number"] for one in alice.played()] == [1, 2, 3]
    assert alice.of_run("commit", cursor=2)["committed"] == 2
    assert [one["number"] for one in alice.played()] == [3]
    assert alice.send("GET", f"runs/{alice.run}/groups", params={"after": 1}).status_code == 410
    assert alice.send("POST", f"runs/{alice.run}/commit", {"cursor": 9}).status_code == 409
    assert alice.get(f"runs/{alice.run}/groups", after=3) == {"groups": [], "cursor": 3}
    assert [line["trajectories"] for one in alice.played(tokens=False) for line in one["episodes"]] == [[]]
    assert f'palestra_episode_claims_total{{owner="alice",run="{alice.run}"}} 3.0' in alice.metrics()
