"""Sampling parameters of players, within what the run allows."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.episodes.conftest import Api, player, say

HI: list[Any] = [{"role": "user", "content": "Hi"}]
LONG = {"ignore_eos": True}


def lease_with(api: Api, **bounds: Any) -> Any:
    api.put_run(model="ephebe", sampling=bounds)
    api.register()
    return api.claim_one()


def params_of(api: Api, lease: Any) -> list[Any]:
    """Of each call, as its trace has them."""
    http = api.server.http(key=api.key)
    query = {"origin": f"{lease['episode_id']}#{lease['attempt']}"}
    traces = [one["id"] for one in http.get("/v1/traces", params=query).json()["data"]]
    turns = [turn for trace in traces for turn in http.get(f"/v1/traces/{trace}").json()["turns"]]
    return [(turn["temperature"], turn["params"]) for turn in turns]


def test_what_is_outside_is_refused_with_the_bounds(alice: Api) -> None:
    import anthropic

    lease = lease_with(alice, min_temperature=0.5, max_temperature=1.0, min_top_p=0.9, max_n=2, can_filter=False)
    with player(lease, max_retries=3) as client:
        for request, words in (
            ({"temperature": 0.2}, "temperature: 0.5 to 1 is allowed in this run, found 0.2"),
            ({"temperature": 1.5}, "temperature: 0.5 to 1 is allowed in this run, found 1.5"),
            ({"top_p": 0.5}, "top_p: 0.9 to 1 is allowed in this run, found 0.5"),
            ({"n": 3}, "n: this run allows at most 2 answers to a call, found 3"),
            ({"presence_penalty": 1.0}, "presence_penalty: this run does not allow"),
            ({"extra_body": {"top_k": 4}}, "top_k: this run does not allow"),
        ):
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                say(client, HI, **request)
            assert refused.value.code == "out_of_bounds"
        with pytest.raises(openai.BadRequestError, match="n: this run allows at most 2 answers"):
            client.completions.create(model="x", prompt=["a", "b", "c"], max_tokens=1)
        fine: dict[str, Any] = {"temperature": 0.5, "top_p": 0.95, "n": 2, "extra_body": {"top_k": -1}}
        assert len(say(client, HI, **fine).choices) == 2
    url = lease["base_url"].removesuffix("/v1")
    with (
        anthropic.Anthropic(base_url=url, api_key=lease["api_key"], max_retries=0) as claude,
        pytest.raises(anthropic.BadRequestError, match="1 is allowed in this run, found 0"),
    ):
        claude.messages.create(model="x", max_tokens=3, messages=HI, extra_body={"temperature": 0.0})
    assert alice.end(lease)["status"] == "accepted"


@pytest.mark.parametrize("allowed", [False, True])
def test_tools_of_the_vendor_are_left_out_or_refused_as_the_run_says(alice: Api, allowed: bool) -> None:
    import anthropic

    search: Any = [{"type": "web_search_20250305", "name": "web_search"}]
    lease = lease_with(alice, can_leave_out_tools=allowed)
    url = lease["base_url"].removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key=lease["api_key"], max_retries=0) as claude:
        ask = claude.messages.with_raw_response.create
        if allowed:
            answer = ask(model="x", max_tokens=3, messages=HI, tools=search)
            assert answer.headers["x-palestra-ignored"].startswith("tools.web_search")
        else:
            with pytest.raises(anthropic.BadRequestError, match="this run allows no call without it"):
                ask(model="x", max_tokens=3, messages=HI, tools=search)
    assert alice.end(lease)["status"] == "accepted"


def test_what_is_outside_is_clamped_where_the_run_says_so(alice: Api) -> None:
    """One value for both ends: whatever players ask for, they are sampled with it."""
    same = {"min_temperature": 0.75, "max_temperature": 0.75, "min_top_p": 1.0}
    lease = lease_with(alice, **same, can_filter=False, outside="clamp")
    with player(lease) as client:
        say(client, HI, temperature=0.0, top_p=0.1, frequency_penalty=1.0)
        say(client, HI, temperature=2.0)
        say(client, HI)
    calls = params_of(alice, lease)
    assert [temperature for temperature, _ in calls] == [0.75] * 3
    for _, params in calls:
        assert not {"top_p", "frequency_penalty"} & params.keys()
    alice.end(lease)
    (episode,) = alice.played()[0]["episodes"]
    drawn = [
        (line["temperatures"][place], sampled)
        for line in episode["trajectories"]
        for place, sampled in enumerate(line["loss_mask"])
        if sampled
    ]
    assert {temperature for temperature, _ in drawn} == {0.75}


def test_too_many_tokens_are_cut_in_every_dialect(alice: Api) -> None:
    lease = lease_with(alice, max_tokens=3)
    with player(lease) as client:
        answer = say(client, HI, max_tokens=50, extra_body=LONG)
        assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)
        untold = client.chat.completions.create(model="x", messages=HI, extra_body=LONG)
        assert (untold.usage and untold.usage.completion_tokens) == 3
        beyond = say(client, HI, max_tokens=2**30, extra_body=LONG)  # more than the model has room for, too
        assert beyond.usage.completion_tokens == 3
        text = client.completions.create(model="x", prompt="Hello", extra_body=LONG)
        assert (text.usage and text.usage.completion_tokens) == 3
        assert say(client, HI, max_tokens=2, extra_body=LONG).usage.completion_tokens == 2
        response = client.responses.create(model="x", input="Hello", max_output_tokens=40, extra_body=LONG)
        assert response.usage is not None
        assert response.usage.output_tokens == 3


def test_bounds_that_make_no_sense_are_refused(alice: Api) -> None:
    for bounds, words in (
        ({"min_temperature": 1.0, "max_temperature": 0.5}, "max_temperature: min_temperature (1) or more"),
        ({"min_temperature": -1.0}, "min_temperature: 0 to 100"),
        ({"min_temperature": 101.0, "outside": "clamp"}, "min_temperature: 0 to 100"),
        ({"min_top_p": 1.5}, "min_top_p: 0 to 1"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"max_n": 0}, "max_n must be 1 or more"),
        ({"outside": "ignore"}, "one of refuse, clamp"),
        ({"max_temprature": 1.0}, "did you mean max_temperature?"),
    ):
        answer = alice.send("PUT", f"runs/{alice.run}", {"settings": {"sampling": bounds}})
        assert (answer.status_code, words in answer.json()["detail"]) == (400, True), answer.text
