"""Converts a request's fields to the engine's sampling parameters."""

from __future__ import annotations

import msgspec

from palestra.server.core.wire_errors import shown
from palestra.server.model_api.errors import invalid
from palestra.server.model_api.model_resolver import SamplingTarget
from palestra.server.model_api.openai_chat.schemas import SamplingFields
from palestra.types import SamplingParams
from palestra.util.json_types import JsonObject

SAME = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""Fields that have the same name in the engine."""


def sampling_params(
    call: SamplingFields, target: SamplingTarget, stop_ids: tuple[int, ...], prompt_tokens: int, max_tokens: int | None
) -> SamplingParams:
    """`max_tokens` is reduced to the room in the context: the answer then ends by length. Agents send what their
    vendor's models can write, whatever the model."""
    room = target.card.max_positions - prompt_tokens
    given: JsonObject = {name: value for name in SAME if (value := getattr(call, name)) is not None}
    ending = () if call.ignore_eos else stop_ids
    return SamplingParams(
        **given,
        max_tokens=max(1, min(room, max_tokens or room)),
        stop_token_ids=tuple(dict.fromkeys([*ending, *(call.stop_token_ids or ())])),
        stop_strings=call.stops,
        logit_bias=_bias(call, target),
    )


def shown_params(params: SamplingParams) -> JsonObject:
    """Returns the parameters that differ from the defaults."""
    values: JsonObject = msgspec.to_builtins(params, str_keys=True)
    return {name: value for name, value in values.items() if value != _DEFAULTS[name]}


_DEFAULTS: JsonObject = msgspec.to_builtins(SamplingParams())


def _bias(call: SamplingFields, target: SamplingTarget) -> dict[int, float]:
    vocabulary = target.card.vocab_size
    bias: dict[int, float] = {}
    for name, value in (call.logit_bias or {}).items():
        if not (name.isascii() and name.isdigit()) or len(name) > 10 or int(name) >= vocabulary:
            raise invalid("logit_bias", f"logit_bias: {shown(name)} is not a token id below {vocabulary}")
        bias[int(name)] = value
    return bias
