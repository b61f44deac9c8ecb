"""Converts a sampling request to a request of vLLM's /v1/completions.

Our records have the model's own log-probabilities at the temperature, before filters and penalties. vLLM, started with
`processed_logprobs`, returns those it sampled from, which are the same if nothing but the temperature changed them.
Otherwise the finished sequence is scored by a second request, which supports temperature 1 only.
"""

from __future__ import annotations

from dataclasses import dataclass

from palestra.server.core.errors import Refusal
from palestra.server.vllm.structured_outputs import can_follow, structured_outputs
from palestra.types import SampleRequest, SamplingParams
from palestra.util.json_types import JsonObject

COLDEST = 0.01  # vLLM raises lower temperatures to this
MAX_BIAS = 100.0  # vLLM limits biases to this
MAX_SEED = (1 << 63) - 1
SCORED_ROOM = 1  # to score a sequence, one more token must fit
UNTOLD = (
    "vLLM does not return the log-probabilities of these draws, which training needs; use temperature 1 or "
    "0, or leave out the other settings"
)


@dataclass(frozen=True, slots=True)
class ServedModelFacts:
    """Facts about the model as vLLM serves it."""

    context: int
    vocabulary: int
    eos: tuple[int, ...]


def check_request(request: SampleRequest, facts: ServedModelFacts) -> None:
    """Refuses what vLLM cannot do, or would silently do differently. vLLM itself reports other errors."""
    p = request.params
    drawn, prompt = p.temperature, request.prompt
    checks = [
        (not prompt, "the prompt has no tokens; send at least one"),
        (request.images, "pictures are not sent to vLLM; set sampler=torch for a model that is to see"),
        (
            prompt and not 0 <= min(prompt) <= max(prompt) < facts.vocabulary,
            f"prompt: a token id is outside the vocabulary of {facts.vocabulary}",
        ),
        (
            len(prompt) + is_scored(request) >= facts.context,
            f"the prompt has {len(prompt)} tokens, which leaves no room in a context of {facts.context}",
        ),
        (request.target_prompt_logprobs is not None, "target_prompt_logprobs: vLLM cannot score given tokens"),
        (request.prompt_alt_tokens_k, "prompt_alt_tokens_k: vLLM cannot draw alternatives to the prompt's tokens"),
        (0 < drawn < COLDEST, f"temperature is {drawn:g}; vLLM accepts 0, or {COLDEST:g} and above"),
        (
            any(not abs(bias) <= MAX_BIAS for bias in p.logit_bias.values()),
            f"logit_bias: vLLM accepts values from {-MAX_BIAS:g} to {MAX_BIAS:g}",
        ),
        (not can_follow(request.grammar), "vLLM cannot combine a custom grammar with tools or thinking"),
        (p.seed is not None and not -MAX_SEED <= p.seed <= MAX_SEED, "seed: vLLM accepts 64 bits"),
        (
            drawn not in (0.0, 1.0) and _reshaping(request),
            f"temperature {drawn:g} with {' and '.join(_reshaping(request))}: {UNTOLD}",
        ),
    ]
    for is_wrong, message in checks:
        if is_wrong:
            raise Refusal(400, f"{message} (this model is sampled by vLLM)")


def is_scored(request: SampleRequest) -> bool:
    """Whether the answer is scored by a second request: for the model's own log-probabilities at temperature 1."""
    return bool(_reshaping(request)) or (request.raw_logprobs and request.params.temperature not in (0.0, 1.0))


def completion_body(request: SampleRequest, model: str, facts: ServedModelFacts, *, stream: bool) -> JsonObject:
    """Returns the request with all relevant fields set, because vLLM may have defaults of its own for others."""
    p = request.params
    room = facts.context - len(request.prompt) - is_scored(request)
    body: JsonObject = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": min(room, p.max_tokens or room),
        "n": request.num_samples,
        "logprobs": 0 if is_scored(request) else request.topk_logprobs,
        "return_tokens_as_token_ids": True,
        "temperature": p.temperature,
        "top_p": p.top_p,
        "top_k": max(0, p.top_k),
        "min_p": p.min_p,
        "presence_penalty": p.presence_penalty,
        "frequency_penalty": p.frequency_penalty,
        "repetition_penalty": p.repetition_penalty,
        # We say which tokens end it, and stop strings must not depend on special tokens being shown.
        "ignore_eos": True,
        "stop_token_ids": [t for t in _stop_ids(p, facts) if 0 <= t < facts.vocabulary],
        "stop": p.stop_strings,
        "skip_special_tokens": False,
        "min_tokens": p.min_tokens,
    }
    if p.seed is not None:
        body["seed"] = p.seed
    if p.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in p.logit_bias.items()}
    if request.grammar is not None:
        body["structured_outputs"] = structured_outputs(request.grammar)
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        body["prompt_logprobs"] = request.topk_prompt_logprobs
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | _salt(request)


def scoring_body(request: SampleRequest, tokens: tuple[int, ...], model: str) -> JsonObject:
    """`tokens` are the prompt and what was sampled."""
    body = {
        "model": model,
        "prompt": tokens,
        "max_tokens": SCORED_ROOM,
        "temperature": 0.0,
        "prompt_logprobs": request.topk_logprobs,
    }
    return body | _salt(request)


def _salt(request: SampleRequest) -> dict[str, str]:
    """Added to every request: without it, an owner's text would be cached where all others find it."""
    return {"cache_salt": request.cache_salt} if request.cache_salt else {}


def _stop_ids(p: SamplingParams, facts: ServedModelFacts) -> tuple[int, ...]:
    return facts.eos if p.stop_token_ids is None else p.stop_token_ids


def _reshaping(request: SampleRequest) -> list[str]:
    """Returns what changes the distribution besides the temperature."""
    p, names = request.params, []
    if p.temperature > 0:
        names += [name for name, is_on in (("top_k", p.top_k > 0), ("top_p", p.top_p < 1), ("min_p", p.min_p)) if is_on]
    others = {
        "repetition_penalty": p.repetition_penalty != 1,
        "presence_penalty": p.presence_penalty,
        "frequency_penalty": p.frequency_penalty,
        "logit_bias": p.logit_bias,
        "min_tokens": p.min_tokens,
        "a grammar": request.grammar is not None,
    }
    return names + [name for name, is_on in others.items() if is_on]
