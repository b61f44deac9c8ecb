"""Responses to chat completions and back, for model servers whose upstream knows only the one."""

from __future__ import annotations

import re
from typing import Any, ClassVar
from uuid import uuid4

from pydantic import BaseModel

from nemo_gym.json_types import JsonObject
from nemo_gym.openai_utils import (
    RESPONSES_TO_TRAIN,
    NeMoGymChatCompletion,
    NeMoGymChatCompletionCreateParamsNonStreaming,
    NeMoGymChoice,
    NeMoGymEasyInputMessage,
    NeMoGymFunctionCallOutput,
    NeMoGymResponse,
    NeMoGymResponseCreateParamsNonStreaming,
    NeMoGymResponseFunctionToolCall,
    NeMoGymResponseInputTokensDetails,
    NeMoGymResponseOutputMessage,
    NeMoGymResponseOutputText,
    NeMoGymResponseOutputTokensDetails,
    NeMoGymResponseReasoningItem,
    NeMoGymResponseUsage,
    NeMoGymSummary,
)
from nemo_gym.response_items import TOKEN_FIELDS

_SHARED = (
    "metadata",
    "parallel_tool_calls",
    "service_tier",
    "temperature",
    "tool_choice",
    "top_logprobs",
    "top_p",
    "user",
)
_PASSED_ON = (*_SHARED, "model", "store", "stream")
_ECHOED = (
    *_SHARED,
    "background",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "previous_response_id",
    "prompt",
    "reasoning",
    "text",
    "tools",
    "truncation",
)
_UNFINISHED = {"length": "max_output_tokens", "content_filter": "content_filter"}
_OUTPUT_TYPES = ("reasoning", "function_call")


class ResponsesConverterState(BaseModel):
    """Messages made so far, and the assistant's, which is made of several items."""

    return_token_id_information: bool
    messages: list[JsonObject] = []
    content: str = ""
    tool_calls: list[JsonObject] = []
    token_information: JsonObject = {}
    is_open: bool = False

    def flush_assistant(self) -> None:
        if not self.is_open:
            return
        message: JsonObject = {"role": "assistant", "content": self.content or None}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        self.messages.append(message | self.token_information)
        self.content, self.tool_calls, self.token_information, self.is_open = "", [], {}, False

    def add(self, item: JsonObject) -> None:
        kind = item.get("type") or "message"
        if kind == "reasoning":
            self._more("".join(f"<think>{one['text']}</think>" for one in item["summary"] if one["text"]), item)
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            self.tool_calls.append({"id": item["call_id"], "type": "function", "function": function})
            self._more("", item)
        elif kind == "message" and item["role"] == "assistant":
            self._more(_text(item["content"]), item)
        elif kind in ("message", "function_call_output"):
            self.flush_assistant()
            self.messages.append(_message(item) if kind == "message" else _tool_message(item))
        else:
            raise NotImplementedError(f"an item of type {kind!r} has no form in chat completions")

    def _more(self, content: str, item: JsonObject) -> None:
        self.is_open = True
        self.content += content
        if self.return_token_id_information and all(name in item for name in TOKEN_FIELDS):
            self.token_information = {name: item[name] for name in TOKEN_FIELDS}


class ResponsesConverter(BaseModel):
    return_token_id_information: bool
    uses_reasoning_parser: bool = True

    THINK_TAG_PATTERN: ClassVar = re.compile(r"<think>(.*?)</think>", re.DOTALL)

    @staticmethod
    def _wrap_reasoning_in_think_tags(texts: list[str]) -> str:
        return "".join(f"<think>{text}</think>" for text in texts if text)

    def _extract_reasoning_from_content(self, content: str) -> tuple[list[str], str]:
        return self.THINK_TAG_PATTERN.findall(content), self.THINK_TAG_PATTERN.sub("", content)

    def responses_to_chat_completion_create_params(
        self, responses_create_params: NeMoGymResponseCreateParamsNonStreaming
    ) -> NeMoGymChatCompletionCreateParamsNonStreaming:
        given = responses_create_params.model_dump(exclude_unset=True)
        items = given["input"]
        state = ResponsesConverterState(return_token_id_information=self.return_token_id_information)
        for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
            state.add(item)
        state.flush_assistant()
        made = {name: given[name] for name in _PASSED_ON if name in given}
        made["messages"] = _instructed(state.messages, given.get("instructions"))
        if given.get("max_output_tokens") is not None:
            made["max_tokens"] = given["max_output_tokens"]
        if effort := (given.get("reasoning") or {}).get("effort"):
            made["reasoning_effort"] = effort
        if given.get("tools"):
            made["tools"] = [_chat_tool(tool) for tool in given["tools"]]
        elif made.get("tool_choice") == "required":
            raise ValueError("tool_choice is required, but there are no tools")
        else:
            made.pop("tool_choice", None)
            made.pop("parallel_tool_calls", None)
        return NeMoGymChatCompletionCreateParamsNonStreaming.model_validate(made)

    def postprocess_chat_response(self, choice: NeMoGymChoice) -> list[Any]:
        return self.postprocess_assistant_message_dict(choice.message.model_dump(exclude_none=True))

    def postprocess_assistant_message_dict(self, message_dict: JsonObject) -> list[Any]:
        """Reasoning, then what was said, then calls; token ids on the last of them."""
        thoughts, content = [], message_dict.get("content") or ""
        if self.uses_reasoning_parser:
            thoughts, content = self._extract_reasoning_from_content(content)
        calls = message_dict.get("tool_calls") or []
        items: list[Any] = []
        if thoughts:
            summary = [NeMoGymSummary(text=text) for text in thoughts]
            items.append(NeMoGymResponseReasoningItem(id=f"rs_{uuid4().hex}", summary=summary))
        if content or not (thoughts or calls):
            text = NeMoGymResponseOutputText(text=content, annotations=[])
            items.append(NeMoGymResponseOutputMessage(id=f"msg_{uuid4().hex}", content=[text]))
        items += [
            NeMoGymResponseFunctionToolCall(
                name=call["function"]["name"],
                arguments=call["function"]["arguments"],
                call_id=call["id"],
                id=call["id"],
                status="completed",
            )
            for call in calls
        ]
        if self.return_token_id_information and "prompt_token_ids" in message_dict:
            found = {name: message_dict[name] for name in (*TOKEN_FIELDS, "routed_experts") if name in message_dict}
            items[-1] = RESPONSES_TO_TRAIN[type(items[-1])](**items[-1].model_dump(), **found)
        return items

    def chat_completions_messages_to_responses_items(self, messages: list[JsonObject]) -> list[Any]:
        items: list[Any] = []
        for message in messages:
            if message["role"] == "assistant":
                items += self.postprocess_assistant_message_dict(message)
            elif message["role"] == "tool":
                call_id, output = message["tool_call_id"], message["content"]
                items.append(NeMoGymFunctionCallOutput(call_id=call_id, output=output, status="completed"))
            elif message["role"] in ("user", "system", "developer"):
                items.append(NeMoGymEasyInputMessage(role=message["role"], content=message["content"] or ""))
            else:
                raise NotImplementedError(f"a message of role {message['role']!r} has no form in responses")
        return items

    def chat_completion_to_response(
        self,
        responses_create_params: NeMoGymResponseCreateParamsNonStreaming,
        chat_completion: NeMoGymChatCompletion,
        *,
        preserve_envelope_id: bool = False,
    ) -> NeMoGymResponse:
        choice = chat_completion.choices[0]
        reason = _UNFINISHED.get(choice.finish_reason)
        return NeMoGymResponse.model_validate(
            {
                **{name: getattr(responses_create_params, name) for name in _ECHOED},
                "id": chat_completion.id if preserve_envelope_id else f"resp_{uuid4().hex}",
                "object": "response",
                "created_at": chat_completion.created,
                "model": responses_create_params.model or chat_completion.model,
                "status": "incomplete" if reason else "completed",
                "output": self.postprocess_chat_response(choice),
                "incomplete_details": reason and {"reason": reason},
                "usage": _usage(chat_completion),
            }
        )


def split_responses_input_output_items(items: list[Any]) -> tuple[list[Any], list[Any]]:
    """Before the first that a model made, and from it on."""
    own = (getattr(one, "role", None) == "assistant" or getattr(one, "type", None) in _OUTPUT_TYPES for one in items)
    at = next((number for number, is_own in enumerate(own) if is_own), len(items))
    return items[:at], items[at:]


VLLMConverter = ResponsesConverter
VLLMConverterResponsesToChatCompletionsState = ResponsesConverterState


def _usage_detail(usage: object, detail_group: str, detail_name: str, *top_level_aliases: str) -> int | None:
    """A count that providers keep in different places: within a group, or under another name."""
    places = [(_field(usage, detail_group), detail_name), *((usage, name) for name in top_level_aliases)]
    counts = (_field(place, name) for place, name in places)
    return next((one for one in counts if isinstance(one, int) and not isinstance(one, bool)), None)


def _field(value: object, name: str) -> object:
    return value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)


def _message(item: JsonObject) -> JsonObject:
    content = item["content"]
    return {"role": item["role"], "content": content if isinstance(content, str) else [_part(one) for one in content]}


def _tool_message(item: JsonObject) -> JsonObject:
    return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])}


def _part(part: JsonObject) -> JsonObject:
    if part["type"] == "input_text":
        return {"type": "text", "text": part["text"]}
    if part["type"] == "input_image":
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part.get("detail") or "auto"}}
    if part["type"] == "input_video":
        return {"type": "video_url", "video_url": {"url": part.get("video_url") or part.get("video")}}
    raise NotImplementedError(f"a part of type {part['type']!r} has no form in chat completions")


def _chat_tool(tool: JsonObject) -> JsonObject:
    return {"type": "function", "function": {k: v for k, v in tool.items() if k not in ("type", "strict")}}


def _instructed(messages: list[JsonObject], instructions: str | None) -> list[JsonObject]:
    """Instructions and the leading system messages are one."""
    if instructions is None:
        return messages
    roles = ("system", "developer")
    count = next((at for at, one in enumerate(messages) if one["role"] not in roles), len(messages))
    texts = [instructions, *(_text(one["content"]) for one in messages[:count])]
    return [{"role": "system", "content": "\n\n".join(texts)}, *messages[count:]]


def _usage(chat_completion: NeMoGymChatCompletion) -> NeMoGymResponseUsage | None:
    counted = chat_completion.usage
    if counted is None:
        return None
    return NeMoGymResponseUsage(
        input_tokens=counted.prompt_tokens,
        input_tokens_details=NeMoGymResponseInputTokensDetails(cached_tokens=0),
        output_tokens=counted.completion_tokens,
        output_tokens_details=NeMoGymResponseOutputTokensDetails(reasoning_tokens=0),
        total_tokens=counted.prompt_tokens + counted.completion_tokens,
    )
