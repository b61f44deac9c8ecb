"""Text completions: what vLLM adds to them, echoes and scores of prompts."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.model_api.conftest import MODEL, Ephebe


@pytest.fixture
def complete(client: openai.OpenAI) -> Any:
    def ask(prompt: Any = "Hello there", **options: Any) -> Any:
        return client.completions.create(**{"model": MODEL, "prompt": prompt, "max_tokens": 6} | options)

    return ask


def test_echo_repeats_the_prompt_and_scores_it(ephebe: Ephebe, complete: Any) -> None:
    answer = complete(echo=True, logprobs=2, temperature=0, extra_body={"return_token_ids": True})
    (choice,) = answer.choices
    assert choice.text.startswith("Hello there")
    logprobs = choice.logprobs
    size = len(choice.prompt_token_ids) + len(choice.token_ids)
    assert [len(logprobs.tokens), len(logprobs.token_logprobs), len(logprobs.text_offset)] == [size] * 3
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    alone = complete(echo=True, logprobs=0, max_tokens=0)
    assert alone.choices[0].text == "Hello there"
    assert alone.usage.completion_tokens == 0
    response = alone.choices[0].logprobs.token_logprobs
    assert response[1:] == pytest.approx(logprobs.token_logprobs[1 : len(response)], abs=1e-5)


def test_prompt_logprobs_as_vllm_tells_them(complete: Any, client: openai.OpenAI) -> None:
    answer = complete(logprobs=0, extra_body={"prompt_logprobs": 2, "return_token_ids": True})
    (choice,) = answer.choices
    first, *others = choice.prompt_logprobs
    assert first is None
    for token, cell in zip(choice.prompt_token_ids[1:], others, strict=True):
        assert str(token) in cell
        assert 2 <= len(cell) <= 3
        ranks = {one["rank"] for one in cell.values()}
        assert {1, 2} <= ranks
    messages: Any = [{"role": "user", "content": "Hello"}]
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=2, extra_body={"prompt_logprobs": 0, "return_token_ids": True}
    )
    response: Any = chat
    assert len(response.prompt_logprobs) == len(response.prompt_token_ids)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_tokens": 0}, "echo or prompt_logprobs"),
        ({"stream": True, "echo": True, "logprobs": 1}, "stream: false"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "stream: false"),
    ],
)
def test_what_cannot_be_is_said(complete: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        complete(**options)
