"""Refuses or ignores request fields that no chat call uses: one table for each API.

Fields that are used are in the schemas. Every other one is of three kinds. Without effect: whatever its value, nothing
is lost. Ignored: the call is answered without it, and a header and the trace say so. Refused: answering without it
would change the meaning of the answer. A field that no table has is a newer client's, and is ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.util.json_types import JsonMapping

IGNORED_HEADER = "x-palestra-ignored"
MAX_SHOWN = 32  # names in the header
_NOT_IN_A_HEADER = re.compile(r"[^A-Za-z0-9_.\[\]-]")


class FieldUse(StrEnum):
    NO_EFFECT = "no effect"
    IGNORED = "ignored"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldRule:
    use: FieldUse
    reason: str
    """Why it is so; for a refused field, what to send instead."""
    harmless: tuple[Any, ...] = ()
    """Values that request nothing, as null always does."""

    def concerns(self, value: object) -> bool:
        return value is not None and value not in self.harmless


FieldRules = Mapping[str, FieldRule]
"""Rules by name; `a.b` is the field `b` of the object `a`."""


def _no_effect(reason: str) -> FieldRule:
    return FieldRule(FieldUse.NO_EFFECT, reason)


def _ignored(reason: str, *harmless: Any) -> FieldRule:
    return FieldRule(FieldUse.IGNORED, reason, harmless)


def _refused(reason: str, *harmless: Any) -> FieldRule:
    return FieldRule(FieldUse.REFUSED, reason, harmless)


NOT_YET = "is not supported here yet"
_STORED = "every call is stored in its trace"
_OWN_CACHE = "what was read before is never read again anyway"
_ONE_TIER = "all calls are served alike"
_LABEL = "a label for the vendor's own records"
_SPEED = "it only makes the vendor's answers faster"

SAMPLING: FieldRules = {
    "best_of": _refused(NOT_YET, 1),
    "use_beam_search": _refused(NOT_YET, False),
    "length_penalty": _refused(NOT_YET, 1.0),
    "allowed_token_ids": _refused(NOT_YET),
    "bad_words": _refused(NOT_YET, []),
    "logits_processors": _refused(NOT_YET, []),
    "guided_whitespace_pattern": _refused(NOT_YET),
    "truncate_prompt_tokens": _refused(NOT_YET),
    "spaces_between_special_tokens": _refused(NOT_YET, True),
    "kv_transfer_params": _refused(NOT_YET),
    "add_special_tokens": _refused(NOT_YET, False),
    "prompt_embeds": _refused(NOT_YET),
    "structural_tag": _refused(NOT_YET),
    "repetition_detection": _refused(NOT_YET),
    "vllm_xargs": _refused(NOT_YET, {}),
    "thinking_token_budget": _ignored("max_tokens is the only bound"),
    "priority": _ignored(_ONE_TIER, 0),
    "service_tier": _ignored(_ONE_TIER, "auto", "default"),
    "store": _no_effect(_STORED),
    "prompt_cache_key": _no_effect(_OWN_CACHE),
    "prompt_cache_retention": _no_effect(_OWN_CACHE),
    "prompt_cache_options": _no_effect(_OWN_CACHE),
    "safety_identifier": _no_effect(_LABEL),
}
"""Fields of chat and text completions, OpenAI's and vLLM's."""

CHAT: FieldRules = {
    **SAMPLING,
    "echo": _refused(NOT_YET, False),
    "suffix": _refused(NOT_YET, ""),
    "functions": _refused("is not supported; send tools", []),
    "function_call": _refused("is not supported; send tool_choice", "none"),
    "audio": _refused(NOT_YET),
    "modalities": _refused(NOT_YET, ["text"]),
    "documents": _refused(NOT_YET, []),
    "chat_template": _refused(NOT_YET),
    "mm_processor_kwargs": _refused(NOT_YET, {}),
    "include_reasoning": _refused(NOT_YET, True),
    "moderation": _refused(NOT_YET),
    "prediction": _ignored(_SPEED),
    "verbosity": _ignored("no template knows it", "medium"),
    "web_search_options": _ignored("the server runs no tools"),
}

TEXT: FieldRules = {
    **SAMPLING,
    "suffix": _refused(NOT_YET, ""),
    "messages": _refused(NOT_YET),
    "tools": _refused(NOT_YET, []),
    "tool_choice": _refused(NOT_YET, "none", "auto"),
    "max_completion_tokens": _refused(NOT_YET),
    "top_logprobs": _refused(NOT_YET, 0),
    "reasoning_effort": _refused(NOT_YET),
    "chat_template_kwargs": _refused(NOT_YET, {}),
    "history": _refused(NOT_YET),
    "continue_final_message": _refused(NOT_YET, False),
    "required_prefix_token_ids": _refused(NOT_YET),
}

TOKENIZE: FieldRules = {name: CHAT[name] for name in ("add_special_tokens", "chat_template")}

OUTPUT_LOGPROBS = "message.output_text.logprobs"
"""A value of `include` in Responses."""
_OTHER_API = "a field of chat completions; send"
_WITH_MESSAGES = "is a field of chat completions; with Messages,"
RESPONSES: FieldRules = {
    "conversation": _refused("conversations are not stored by id; send previous_response_id, or the whole as input"),
    "prompt": _refused("there are no stored prompts; send instructions and input"),
    "background": _refused("background responses are not supported; leave it out, and wait or stream", False),
    "context_management": _refused(f"{NOT_YET}; compact the conversation at the client", []),
    "moderation": _refused(NOT_YET),
    "access_programs": _refused(NOT_YET),
    "image": _refused(NOT_YET, {}),
    "stream_options": _refused(NOT_YET, {}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "messages": _refused(f"{_OTHER_API} input"),
    "max_tokens": _refused(f"{_OTHER_API} max_output_tokens"),
    "max_completion_tokens": _refused(f"{_OTHER_API} max_output_tokens"),
    "response_format": _refused(f"{_OTHER_API} text.format"),
    "reasoning_effort": _refused(f"{_OTHER_API} reasoning.effort"),
    "verbosity": _refused(f"{_OTHER_API} text.verbosity"),
    "logprobs": _refused(f'{_OTHER_API} include: ["{OUTPUT_LOGPROBS}"]', False),
    "prompt_logprobs": _refused("only chat completions return them; a response has no field for them"),
    "n": _refused("a response is one sample; send the request n times", 1),
    "truncation": _ignored("conversations are not truncated: one that is too long is refused", "disabled"),
    "text.verbosity": _ignored("no template knows it", "medium"),
    "reasoning.summary": _ignored("reasoning is returned in full", "auto", "detailed"),
    "reasoning.generate_summary": _ignored("reasoning is returned in full", "auto", "detailed"),
    "reasoning.context": _ignored("what was sampled stays in the conversation", "auto"),
    "reasoning.mode": _ignored("there is one mode", "standard"),
    "max_tool_calls": _no_effect("it limits tools that the vendor runs"),
    "client_metadata": _no_effect(_LABEL),
}
"""In addition to those of chat calls."""

MESSAGES: FieldRules = {
    "container": _refused("is not supported: the server runs no tools"),
    "mcp_servers": _refused("is not supported: the server runs no tools; connect the client to them", []),
    "compaction": _refused(f"{NOT_YET}; compact the conversation at the client"),
    "stop": _refused(f"{_WITH_MESSAGES} send stop_sequences"),
    "max_completion_tokens": _refused(f"{_WITH_MESSAGES} send max_tokens"),
    "user": _refused(f"{_WITH_MESSAGES} send metadata.user_id"),
    "response_format": _refused(f"{_WITH_MESSAGES} send output_config.format"),
    "parallel_tool_calls": _refused(f"{_WITH_MESSAGES} send tool_choice.disable_parallel_tool_use"),
    "reasoning_effort": _refused(f"{_WITH_MESSAGES} send output_config.effort"),
    "continue_final_message": _refused(f"{_WITH_MESSAGES} it follows from whose message is the last"),
    "add_generation_prompt": _refused(f"{_WITH_MESSAGES} it follows from whose message is the last"),
    "logprobs": _refused(f"{_WITH_MESSAGES} send return_token_ids, which also returns the logprobs"),
    "top_logprobs": _refused(f"{_WITH_MESSAGES} send return_token_ids, which also returns logprobs"),
    "return_tokens_as_token_ids": _refused(f"{_WITH_MESSAGES} send return_token_ids"),
    "prompt_logprobs": _refused(f"{_WITH_MESSAGES} a Message has no field for them"),
    "stream_options": _refused(f"{_WITH_MESSAGES} usage is always sent"),
    "n": _refused(f"{_WITH_MESSAGES} a Message is one answer; send the request several times"),
    "service_tier": _ignored(_ONE_TIER, "auto", "standard_only"),
    "speed": _ignored(_ONE_TIER, "standard"),
    "inference_geo": _ignored("the server is where it is"),
    "fallbacks": _ignored("no other model takes over", []),
    "fallback_credit_token": _no_effect(_LABEL),
    "diagnostics": _ignored("there are none"),
    "output_config.task_budget": _ignored("max_tokens is the only bound"),
    "betas": _no_effect("what is supported needs no beta"),
    "cache_control": _no_effect(_OWN_CACHE),
}
"""In addition to those of chat calls."""


def check_fields(rules: FieldRules, given: Any) -> None:
    """Raises a refusal for the first field that is refused."""
    for name, rule, value in _concerned(rules, given):
        if rule.use is FieldUse.REFUSED:
            if rule.reason.startswith(_WITH_MESSAGES):
                raise invalid(None, f"{name} {rule.reason}")
            shows = rule.reason.startswith("is ") and not isinstance(value, dict | list)  # which may hold secrets
            advice = f"{shown(value)} {rule.reason}" if shows else rule.reason
            raise invalid(name, f"{name}: {advice}", code="unsupported")


def ignored_fields(rules: FieldRules, given: JsonMapping) -> list[str]:
    return [name for name, rule, _ in _concerned(rules, given) if rule.use is FieldUse.IGNORED]


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """Returns the header that lists them; what a header cannot hold is replaced."""
    shown_names = [_NOT_IN_A_HEADER.sub("?", name)[:64] for name in dict.fromkeys(names)]
    return {IGNORED_HEADER: ", ".join(shown_names[:MAX_SHOWN])} if shown_names else {}


def _concerned(rules: FieldRules, given: Any) -> Iterator[tuple[str, FieldRule, object]]:
    for name, rule in rules.items() if isinstance(given, Mapping) else ():
        outer, _, inner = name.partition(".")
        value = given.get(outer)
        if inner:
            value = value.get(inner) if isinstance(value, Mapping) else getattr(value, inner, None)
        if rule.concerns(value):
            yield name, rule, value
