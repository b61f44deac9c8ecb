"""OpenAI's chat completions, as OpenAI, vLLM and we have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.net.chat_apis.answers import AnswerPiece, CallAnswer, NotAnAnswer, TokenLogprob
from palestra.types import StopReason
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject


class OpenAIChat:
    name: str = "openai"
    path: str = "/chat/completions"
    has_logprobs: bool = True

    def __init__(self, *, is_openai: bool = False) -> None:
        """`is_openai`: it is OpenAI itself, whose newer models know `max_tokens` by its later name only."""
        self._is_openai = is_openai

    def headers(self, key: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {key}"}

    def body(self, model: str, messages: Sequence[Message], options: Mapping[str, object]) -> JsonObject:
        given = dict(options)
        if self._is_openai and "max_tokens" in given:
            given["max_completion_tokens"] = given.pop("max_tokens")
        if given.get("stream"):
            given["stream_options"] = {"include_usage": True}
        return {"model": model, "messages": list(messages), **given}

    def answer(self, body: JsonMapping) -> CallAnswer:
        try:
            choice, usage = body["choices"][0], body["usage"]
            message = {key: value for key, value in choice["message"].items() if value is not None}
            return CallAnswer(
                {"role": "assistant", "content": "", **message},
                _stop(choice["finish_reason"]),
                usage["prompt_tokens"],
                usage["completion_tokens"],
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise NotAnAnswer(repr(error)) from None

    def piece(self, event: JsonMapping) -> AnswerPiece:
        try:
            usage = event.get("usage") or {}
            choice = (event["choices"] or [{}])[0]
            delta = choice.get("delta") or {}
            tokens = (choice.get("logprobs") or {}).get("content") or ()
            finish = choice.get("finish_reason")
            return AnswerPiece(
                text=delta.get("content") or "",
                reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
                tokens=tuple(TokenLogprob(one["token"], one["logprob"]) for one in tokens),
                stop=None if finish is None else _stop(finish),
                prompt_tokens=usage.get("prompt_tokens", 0),
                sampled_tokens=usage.get("completion_tokens", 0),
            )
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise NotAnAnswer(repr(error)) from None


def _stop(finish_reason: str) -> StopReason:
    return StopReason.LENGTH if finish_reason == "length" else StopReason.STOP
