"""A conversation goes on in the ids that were read and sampled: after a restart, inside an answer, from ids that the
client brings along; or, where it asks for it, as the template writes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from palestra.chat import ChatTokenizer
from palestra.chat.conversation_cache import HistoryMatch, PromptRequest, SampledReply, SampleLocation
from palestra.config.bundled import bundled_model
from palestra.config.serve import ServeConfig
from palestra.server.model_api.conversation_store import ConversationStore
from palestra.store import Store
from tests.server.model_api.conftest import MODEL, Ephebe

Chat = Callable[..., Any]
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
MORE: dict[str, Any] = {"role": "user", "content": "And then?"}
IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    folder = bundled_model(MODEL)
    assert folder is not None
    return ChatTokenizer.load(folder)


def said(answer: Any) -> dict[str, Any]:
    return answer.choices[0].message.model_dump(exclude_none=True)


def whole(answer: Any) -> list[int]:
    return [*answer.prompt_token_ids, *answer.choices[0].token_ids]


def turns(server: Ephebe, answer: Any) -> list[dict[str, Any]]:
    return server.http().get(f"/v1/traces/{answer.trace_id}").json()["turns"]


def ask(server: Ephebe, *messages: dict[str, Any], **fields: Any) -> Any:
    client = server.openai()
    given: list[Any] = list(messages)
    return client.chat.completions.create(
        model=MODEL, messages=given, max_tokens=6, temperature=2.0, extra_body={**IDS, **fields}
    )


# What was let go


def test_a_killed_server_and_a_full_one_go_on_token_for_token(mortal: Ephebe) -> None:
    server = mortal
    first = ask(server, HI)
    second = ask(server, HI, said(first), MORE)
    server.restart()
    third = ask(server, HI, said(first), MORE, said(second), MORE)
    assert third.prompt_token_ids[: len(whole(second))] == whole(second)
    assert [turn["match"] for turn in turns(server, third)] == ["new", "continued", "continued"]
    ask(server, {"role": "user", "content": "Another"})  # there is room for one
    fourth = ask(server, HI, said(first), MORE, said(second), MORE, said(third), MORE)
    assert fourth.prompt_token_ids[: len(whole(third))] == whole(third)
    assert [turn["parent"] for turn in turns(server, fourth)] == [None, 0, 1, 2]
    branch = ask(server, HI, said(first), HI)
    assert branch.prompt_token_ids[: len(whole(first))] == whole(first)
    (trajectory,) = server.http().get(f"/v1/traces/{first.trace_id}/trajectories").json()["data"][:1]
    assert trajectory["tokens"] == whole(fourth)


# The template's way


def test_a_request_may_have_its_history_rendered(ephebe: Ephebe, tokenizer: ChatTokenizer) -> None:
    first = ask(ephebe, {"role": "user", "content": "Render this"})
    messages = [{"role": "user", "content": "Render this"}, said(first), MORE]
    rendered, exact = (ask(ephebe, *messages, history=history) for history in ("template", "exact"))
    assert rendered.prompt_token_ids == tokenizer.encode_chat(messages)
    assert exact.prompt_token_ids[: len(whole(first))] == whole(first)
    is_same = rendered.prompt_token_ids[: len(whole(first))] == whole(first)
    last = turns(ephebe, rendered)[-1 if is_same else 0]
    assert last["match"] == ("continued" if is_same else "unmatched")
    with pytest.raises(openai.BadRequestError, match="history"):
        ask(ephebe, HI, history="none")


def test_a_server_may_render_all_histories(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    async def check(store: Store, config: ServeConfig) -> None:
        held = ConversationStore(config, store)
        first = await held.prompt(tokenizer, lambda: PromptRequest(("o",), [HI]))
        answer = {"role": "assistant", "content": "ab"}
        held.keep(first, [SampledReply(answer, [64, 65], SampleLocation("t", 0, 0))])
        messages = [HI, answer, MORE]
        second = await held.prompt(tokenizer, lambda: PromptRequest(("o",), messages))
        assert (second.ids, second.match) == (tokenizer.encode_chat(messages), HistoryMatch.UNMATCHED)

    with Store.open(f"sqlite:///{tmp_path}/x.db") as store:
        asyncio.run(check(store, ServeConfig(history="template")))


def test_a_past_that_the_template_would_rewrite_is_counted(ephebe: Ephebe) -> None:
    silent = {"chat_template_kwargs": {"enable_thinking": False}}  # a think block that is closed at once, and not shown
    line = f'palestra_conversation_calls_total{{base_model="{MODEL}",match="drift"}}'

    def counted() -> float:
        found = [text.split()[-1] for text in ephebe.metrics().splitlines() if text.startswith(line)]
        return float(found[0]) if found else 0.0

    before = counted()
    first = ask(ephebe, HI, **silent)
    second = ask(ephebe, HI, said(first), MORE, **silent)
    assert second.prompt_token_ids[: len(whole(first))] == whole(first)
    assert [turn["drift"] for turn in turns(ephebe, second)] == [False, True]
    assert counted() == before + 1


# Ids that a client brings along


def test_required_ids_stand_in_chats_and_in_tokenize(ephebe: Ephebe, tokenizer: ChatTokenizer) -> None:
    ids = [*tokenizer.encode_chat([HI]), 70, 71, 72]
    messages = [HI, {"role": "assistant", "content": "never sampled"}, MORE]
    expected = [*ids, tokenizer.turn_end, *tokenizer.observation([MORE])]
    answer = ask(ephebe, *messages, required_prefix_token_ids=ids)
    assert answer.prompt_token_ids == expected
    assert [turn["match"] for turn in turns(ephebe, answer)] == ["given"]
    body = {"model": MODEL, "messages": messages, "required_prefix_token_ids": [*ids, tokenizer.turn_end]}
    assert ephebe.http().post("/tokenize", json=body).json()["tokens"] == expected


def test_ids_on_messages_are_required_ids(ephebe: Ephebe, tokenizer: ChatTokenizer) -> None:
    first = ask(ephebe, HI)
    fields = {
        "prompt_token_ids": first.prompt_token_ids,
        "generation_token_ids": first.choices[0].token_ids,
        "generation_log_probs": [-1.0] * len(first.choices[0].token_ids),
    }
    ours = ask(ephebe, HI, {**said(first), **fields}, MORE)
    assert (turns(ephebe, ours)[-1]["match"], ours.trace_id) == ("continued", first.trace_id)
    other = ask(ephebe, HI, {**said(first), "content": "edited", **fields}, MORE)
    assert other.prompt_token_ids == ours.prompt_token_ids
    assert [turn["match"] for turn in turns(ephebe, other)] == ["given"]
    rendered = ask(ephebe, HI, {**said(first), "content": "edited", **fields}, MORE, history="template")
    assert rendered.prompt_token_ids == tokenizer.encode_chat([HI, {**said(first), "content": "edited"}, MORE])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_token_ids": [1]}, "generation_token_ids is missing"),
        ({"generation_log_probs": []}, "prompt_token_ids is missing"),
        ({"prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": []}, "one number for each"),
        ({"prompt_token_ids": ["a"], "generation_token_ids": [], "generation_log_probs": []}, "list of token ids"),
        ({"prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []}, "empty"),
        ({"prompt_token_ids": [2**20], "generation_token_ids": [], "generation_log_probs": []}, "vocabulary"),
    ],
)
def test_ids_on_messages_come_together_or_not_at_all(ephebe: Ephebe, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        ask(ephebe, HI, {"role": "assistant", "content": "x", **fields}, MORE)


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [
        ([HI], {"required_prefix_token_ids": [1]}, "there is no such message"),
        ([HI, {"role": "assistant", "content": "x"}], {"required_prefix_token_ids": []}, "empty"),
        (
            [HI, {"role": "assistant", "content": "x"}],
            {"required_prefix_token_ids": [1], "history": "template"},
            "leave out required_prefix_token_ids",
        ),
        ([HI], {"continue_final_message": True}, "it must be assistant"),
        (
            [HI, {"role": "assistant", "content": "x"}],
            {"continue_final_message": True, "add_generation_prompt": True},
            "both true",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    ephebe: Ephebe, messages: list[Any], fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason):
        ask(ephebe, *messages, **fields)
    body = {"model": MODEL, "messages": messages, **fields}
    assert reason in ephebe.http().post("/tokenize", json=body).json()["error"]["message"]


# Answers that go on

CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


def test_an_answer_that_was_cut_goes_on_where_it_stopped(ephebe: Ephebe) -> None:
    question = {"role": "user", "content": "Count to ten"}
    options = {"ignore_eos": True}
    first = ask(ephebe, question, **options)
    rest = ask(ephebe, question, said(first), **CONTINUE, **options)
    assert rest.prompt_token_ids == whole(first)
    assert (rest.choices[0].finish_reason, rest.trace_id) == ("length", first.trace_id)
    content = "".join(part.get("content") or "" for part in (said(first), said(rest)))
    thought = "".join(part.get("reasoning_content") or "" for part in (said(first), said(rest)))
    joined = {"role": "assistant", "content": content, **({"reasoning_content": thought} if thought else {})}
    after = ask(ephebe, question, joined, MORE)
    assert after.prompt_token_ids[: len(whole(rest))] == whole(rest)
    assert [turn["match"] for turn in turns(ephebe, after)] == ["new", "continued", "continued"]
    (trajectory,) = ephebe.http().get(f"/v1/traces/{after.trace_id}/trajectories").json()["data"]
    assert trajectory["tokens"] == whole(after)


def test_an_answer_may_begin_with_the_clients_words(ephebe: Ephebe, tokenizer: ChatTokenizer) -> None:
    begun = {"role": "assistant", "content": "There are"}
    question = {"role": "user", "content": "How many?"}
    expected = [*tokenizer.encode_chat([question]), *tokenizer.encode_text("There are")]
    body = {"model": MODEL, "messages": [question, begun], **CONTINUE}
    assert ephebe.http().post("/tokenize", json=body).json()["tokens"] == expected
    answer = ask(ephebe, question, begun, **CONTINUE)
    assert answer.prompt_token_ids == expected
    assert not (said(answer).get("content") or "").startswith("There are")
    joined = {"role": "assistant", "content": f"There are{said(answer).get('content') or ''}"}
    after = ask(ephebe, question, joined, MORE)
    assert after.prompt_token_ids[: len(whole(answer))] == whole(answer)
    assert [turn["begun"] for turn in turns(ephebe, after)] == [
        len(expected) - len(tokenizer.encode_chat([question])),
        0,
    ]


def test_a_thought_that_was_cut_goes_on_as_a_thought(ephebe: Ephebe) -> None:
    question = {"role": "user", "content": "Think"}
    begun = {"role": "assistant", "content": "<think>\nLet me"}
    answer = ask(ephebe, question, begun, **CONTINUE, ignore_eos=True)
    assert said(answer).get("reasoning_content")
    assert not said(answer).get("content")
