"""Anthropic's Messages API: chat calls in OpenAI's form become its requests, its answers become messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.net.chat_apis.answers import AnswerPiece, CallAnswer, NotAnAnswer
from palestra.net.chat_apis.anthropic_format import STOP_REASONS, prompt_tokens
from palestra.types import StopReason
from palestra.types.rollouts import Message
from palestra.util.json_types import JsonMapping, JsonObject

VERSION = "2023-06-01"
MAX_TOKENS = 4096  # the API wants a limit in every call
SYSTEM = ("system", "developer")
EMPTY = "(nothing)"  # what stands for a message without text, which the API refuses


class AnthropicMessages:
    name: str = "anthropic"
    path: str = "/messages"
    has_logprobs: bool = False

    def headers(self, key: str) -> dict[str, str]:
        return {"x-api-key": key, "anthropic-version": VERSION}

    def body(self, model: str, messages: Sequence[Message], options: Mapping[str, object]) -> JsonObject:
        system = "\n\n".join(_text(one) for one in messages if one["role"] in SYSTEM)
        blocks = [
            {
                "role": "assistant" if one["role"] == "assistant" else "user",
                "content": _text(one) or EMPTY,
            }
            for one in messages
            if one["role"] not in SYSTEM
        ]
        body: JsonObject = {"model": model, "max_tokens": options.get("max_tokens") or MAX_TOKENS, "messages": blocks}
        body |= {name: options[name] for name in ("temperature", "top_k", "stream") if name in options}
        if options.get("top_p", 1.0) != 1.0:  # newer models refuse it beside a temperature
            body["top_p"] = options["top_p"]
        return body | ({"system": system} if system else {})

    def answer(self, body: JsonMapping) -> CallAnswer:
        try:
            text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
            reasoning = "".join(block["thinking"] for block in body["content"] if block["type"] == "thinking")
            message = {"role": "assistant", "content": text}
            if reasoning:
                message["reasoning_content"] = reasoning
            usage = body["usage"]
            return CallAnswer(message, _stop(body["stop_reason"]), prompt_tokens(usage), usage["output_tokens"])
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise NotAnAnswer(repr(error)) from None

    def piece(self, event: JsonMapping) -> AnswerPiece:
        try:
            match event["type"]:
                case "message_start":
                    return AnswerPiece(prompt_tokens=prompt_tokens(event["message"]["usage"]))
                case "content_block_delta":
                    delta = event["delta"]
                    return AnswerPiece(text=delta.get("text", ""), reasoning=delta.get("thinking", ""))
                case "message_delta":
                    stop = event["delta"].get("stop_reason")
                    return AnswerPiece(
                        stop=None if stop is None else _stop(stop), sampled_tokens=event["usage"]["output_tokens"]
                    )
            return AnswerPiece()
        except (KeyError, TypeError, AttributeError) as error:
            raise NotAnAnswer(repr(error)) from None


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _stop(stop_reason: str) -> StopReason:
    return StopReason.LENGTH if stop_reason == STOP_REASONS["length"] else StopReason.STOP
