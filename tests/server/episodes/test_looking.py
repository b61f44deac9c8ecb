"""Episodes to look at: found by reward, error and task, told with all that happened in them, without secrets."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from tests.server.episodes.conftest import Api, player, ref, say
from tests.server.model_api.stockroom import TOOLS, question, result

SECRET = "tml-0123456789abcdef"
MASKED = "555-0123"  # the shared server's config names such numbers


def task(text: str, **extras: Any) -> dict[str, Any]:
    return {"id": text, "environment": "arithmetic", "prompt": [{"role": "user", "content": text}], "extras": extras}


@pytest.fixture
def three(alice: Api) -> dict[str, str]:
    """Ids by what became of them."""
    for name, given in (("good", task("How many CUPS?")), ("bad", task("hats", note="cups")), ("broken", task("x"))):
        alice.register(name, task=given)
    good, bad, broken = alice.claim(max_n=3)
    alice.end(good, 1.0)
    alice.end(bad, step_rewards=[0.25, 0.0], reward=None)
    alice.end(broken, reward=None, error={"type": "ToolError", "message": f"no such file, with {SECRET}"})
    (waits,) = alice.register("waits", task=task("Hats again"))
    return {"waits": waits} | {lease["group_id"]: lease["episode_id"] for lease in (good, bad, broken)}


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"reward_below": 0.5}, ["bad"]),
        ({"reward_below": 0.25}, []),
        ({"reward_min": 0.25}, ["good", "bad"]),
        ({"reward_min": 0.25, "reward_below": 1}, ["bad"]),
        ({"error": "toolerror: no such"}, ["broken"]),
        ({"error": ""}, ["broken"]),
        ({"error": "timeout"}, []),
        ({"task": "cups"}, ["good", "bad"]),
        ({"task": "hats"}, ["bad", "waits"]),
        ({"task": "hats", "state": "ended"}, ["bad"]),
        ({"task": "hats", "limit": 1, "offset": 1}, ["waits"]),
    ],
)
def test_episodes_are_found_by_reward_error_and_task(
    alice: Api, three: dict[str, str], query: dict[str, Any], expected: list[str]
) -> None:
    found = alice.get("episodes", run=alice.run, **query)
    assert [one["episode_id"] for one in found["episodes"]] == [three[name] for name in expected]
    assert found["total"] == len(expected) + query.get("offset", 0)


def test_what_cannot_be_searched_is_named_and_others_are_not_found(alice: Api, bob: Api, three: dict[str, str]) -> None:
    for query in ({"reward_min": "nan"}, {"reward_below": "much"}, {"limit": 5000}, {"state": "lost"}, {"limit": 0}):
        refused = alice.send("GET", "episodes", params=query)
        assert (refused.status_code, next(iter(query)) in refused.json()["detail"]) == (400, True)
    assert bob.get("episodes", task="cups")["total"] == 0
    assert bob.send("GET", f"episodes/{three['good']}/timeline").status_code == 404
    for query in ({"task": "cups"}, {"format": "jsonl"}):
        assert bob.send("GET", "episodes", params={"run": alice.run, **query}).status_code == 404


def test_one_that_nobody_could_play_is_found_by_why(alice: Api) -> None:
    alice.register("g", size=2, on_loss="shrink", min_size=1)
    lease, other = alice.claim(max_n=2)
    alice.post("cancel", run=alice.run, episode_ids=[lease["episode_id"]], reason="no Room")
    alice.post("release", client_id=alice.client_id, leases=[ref(other)], reason="no room")
    found = alice.get("episodes", run=alice.run, error="no room")
    assert [one["episode_id"] for one in found["episodes"]] == [lease["episode_id"]]  # the other one is queued again


def test_a_timeline_has_calls_tools_and_messages_and_no_secrets(alice: Api) -> None:
    alice.put_run(backoff_s=0)
    alice.register("g", task=task("stock", password="sesame", phone=f"call {MASKED}"))
    lost = alice.claim_one()
    alice.post("release", client_id=alice.client_id, leases=[ref(lost)], reason="not now")
    lease = alice.claim_one(wait_s=10)
    policy, messages = player(lease), question()
    while True:
        answer = say(policy, messages, tools=TOOLS, temperature=0, max_tokens=64)
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        messages += [{**result(call), "content": f"{result(call)['content']} ({SECRET})"} for call in said.tool_calls]
        if len(messages) > 12:
            break
    alice.end(lease, 0.5, metadata={"note": MASKED})
    got = alice.send("GET", f"episodes/{lease['episode_id']}/timeline")
    for secret in (SECRET, MASKED, "sesame", lease["api_key"]):
        assert secret not in got.text
    response = got.json()
    first, second = response["attempts"]
    assert (first["attempt"], first["outcome"], first["calls"]) == (1, "released: not now", [])
    assert (second["attempt"], second["outcome"]) == (2, "ended")
    assert second["trace_id"] == lease["traceparent"].split("-")[1] != first["trace_id"]
    calls, tools = second["calls"], second["tools"]
    assert len(calls) == response["episode"]["calls"] >= 2
    assert calls[0]["messages"] == question()
    assert [message["role"] for call in calls[1:] for message in call["messages"]] == ["tool"] * len(tools)
    assert tools[0]["name"] == "count"
    assert json.loads(tools[0]["arguments"])["item"] in ("cups", "hats")
    assert tools[0]["result"].endswith("([redacted])")
    for call, after in pairwise(calls):
        (span,) = [tool for tool in tools if call["began_at"] < tool["began_at"] < after["began_at"]]
        assert span["seconds"] == pytest.approx(after["began_at"] - span["began_at"])
    assert response["task"]["id"] == "stock"


def test_what_was_found_is_exported_in_lines(alice: Api, three: dict[str, str]) -> None:
    query = {"run": alice.run, "state": "ended", "format": "jsonl"}
    got = alice.send("GET", "episodes", params=query)
    assert (got.headers["content-type"], SECRET in got.text) == ("application/x-ndjson", False)
    lines = [json.loads(line) for line in got.text.splitlines()]
    assert [line["episode"]["episode_id"] for line in lines] == [three[name] for name in ("good", "bad", "broken")]
    assert [line["task"]["id"] for line in lines] == ["How many CUPS?", "hats", "x"]
    limited = alice.send("GET", "episodes", params={**query, "limit": 1, "offset": 1}).text.splitlines()
    assert [json.loads(line)["episode"]["episode_id"] for line in limited] == [three["bad"]]


def test_an_attempt_has_one_trace_id_in_its_lease_and_in_the_log(alice: Api) -> None:
    alice.register("g")
    lease = alice.claim_one(claim_id="mine")
    assert alice.claim_one(claim_id="mine")["traceparent"] == lease["traceparent"]
    version, trace_id, _span, flags = lease["traceparent"].split("-")
    assert (version, len(trace_id), flags) == ("00", 32, "01")
    alice.end(lease)
    said = [line for line in alice.server.said().splitlines() if trace_id in line]
    assert [what for what in ("episode claimed", "episode ended") if any(what in line for line in said)] == [
        "episode claimed",
        "episode ended",
    ]
