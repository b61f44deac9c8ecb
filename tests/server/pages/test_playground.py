"""The playground: what can be talked to, over the endpoint that programs use, with the cookie of the login page."""

from __future__ import annotations

import pytest

from palestra.server.pages.playground_routes import (
    MAX_PAGE_TOKENS,
    MAX_TOKENS,
    Opening,
    opening_of,
    token_limits,
)
from tests.server.raw import Raw
from tests.view.folders import HOSTILE

CHAT = "/v1/chat/completions"


def ask(browser, text: str = "What is 1 + 1?", **options):
    said = {"model": "ephebe", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **options}
    answer = browser.post(CHAT, json=said)
    assert answer.status_code == 200, answer.text
    return answer


def test_a_cookie_is_enough_to_talk(open_browser):
    answer = ask(open_browser("alice"), logprobs=True, top_logprobs=2).json()
    (choice,) = answer["choices"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2
    streamed = ask(open_browser("alice"), stream=True).text
    assert streamed.endswith("data: [DONE]\n\n")
    assert '"trace_id"' in streamed


def test_checkpoints_and_aliases_are_offered_to_their_owner(keyed, keys, open_browser):
    api = Raw(keyed, keys["alice"])
    model = api.model(base_model="ephebe")
    api.result(model.send("save_weights_for_sampler", path="offered"))
    path = f"tinker://{model.model_id}/sampler_weights/offered"
    assert keyed.http(key=keys["alice"]).put("/v1/aliases/policy", json={"model": path}).status_code == 200
    alice, bob = open_browser("alice"), open_browser("bob")
    hers = {one["id"]: one["kind"] for one in alice.get("/api/v1/playground/models").json()}
    assert hers == {"ephebe": "base", "policy": "alias", path: "checkpoint"}
    his = [one["id"] for one in bob.get("/api/v1/playground/models").json()]
    assert his == ["ephebe"]
    page = alice.get("/playground", params={"model": "policy", "beside": path}).text
    assert '<option value="policy" selected>' in page
    assert f'<option value="{path}" selected>' in page
    assert ask(alice, model="policy").json()["trace_id"]
    assert path not in bob.get("/playground").text


def test_a_call_has_a_page_for_its_owner(open_browser):
    alice = open_browser("alice")
    first = ask(alice, f"{HOSTILE} 1 + 1").json()
    trace = first["trace_id"]
    page = alice.get(f"/traces/{trace}").text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    assert "\x1b" not in page
    assert page.count('title="log-probability') == first["usage"]["completion_tokens"]
    assert trace in alice.get("/traces").text
    for path in (f"/traces/{trace}", f"/v1/traces/{trace}"):
        assert open_browser("bob").get(path).status_code == 404
    assert trace not in open_browser("bob").get("/traces").text


def test_a_conversation_is_shown_up_to_any_turn(open_browser):
    alice = open_browser("alice")
    first = ask(alice, "What is 2 + 2?").json()
    said = first["choices"][0]["message"]["content"]
    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And now?"},
    ]
    second = ask(alice, messages=messages).json()
    assert second["trace_id"] == first["trace_id"]
    page = alice.get(f"/traces/{first['trace_id']}").text
    assert page.index("What is 2 + 2?") < page.index("And now?")
    assert "And now?" not in alice.get(f"/traces/{first['trace_id']}", params={"turn": 0}).text


def test_a_long_trace_shows_the_tokens_of_its_newest_turns():
    assert token_limits([[3, 2], [4]]) == [[3, 2], [4]]
    limits = token_limits([[MAX_TOKENS]] * 1000 + [[2 * MAX_TOKENS, 5]])
    assert limits[-1] == [MAX_TOKENS, 5]
    assert limits[-2] == [MAX_TOKENS]
    assert limits[0] == [0]
    assert sum(map(sum, limits)) == MAX_PAGE_TOKENS


@pytest.mark.parametrize("path", ["/playground", "/api/v1/playground/models", "/v1/models", "/traces"])
def test_a_key_for_metrics_talks_to_nobody(open_browser, path):
    assert open_browser("prometheus").get(path).status_code == 403


def test_a_rollout_opens_a_conversation_with_its_prompt():
    said = [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "How many?"},
        {"role": "user", "content": [{"type": "text", "text": "And why?"}]},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "later"},
    ]
    assert opening_of(said) == Opening("Use tools.", "How many?\n\nAnd why?")
    assert opening_of([]) == Opening()


def test_only_those_who_see_runs_open_one_in_the_playground(open_browser):
    query = {"run": "nobody", "step": 1, "id": "g-0"}
    assert open_browser("alice").get("/playground", params=query).status_code == 403
    answer = open_browser("carol").get("/playground", params=query)
    assert answer.status_code == 404
    assert "there is no run" in answer.text


def test_the_state_of_a_training_run_is_sampled_from_by_its_address(keyed, keys, open_browser):
    """Checkpoints of runs lead here by their address."""
    model = Raw(keyed, keys["alice"]).model(base_model="ephebe")
    address = f"tinker://{model.model_id}/weights/kept"
    Raw(keyed, keys["alice"]).result(model.send("save_weights", path="kept"))
    alice = open_browser("alice")
    assert f'<option value="{address}" selected>' in alice.get("/playground", params={"model": address}).text
    assert ask(alice, model=address).json()["model"] == address
