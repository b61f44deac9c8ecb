"""Is a sampling request sound? Everything is refused here, before it can disturb a batch."""

from __future__ import annotations

from math import inf, isfinite

from palestra.model.errors import DataError
from palestra.model.spec import ModelSpec
from palestra.types import SampleRequest


def check_request(request: SampleRequest, spec: ModelSpec, *, has_tokenizer: bool) -> None:
    """Raises DataError with the first thing that is wrong, and what would be right."""
    p = request.params
    if not request.prompt:
        raise DataError("the prompt has no tokens; send at least one (the model's start token, say)")
    if not all(isinstance(t, int) for t in request.prompt):
        raise DataError("prompt: every token must be a whole number")
    if not 0 <= min(request.prompt) <= max(request.prompt) < spec.vocab_size:
        raise DataError(f"prompt: a token id is outside the vocabulary of {spec.vocab_size}")
    if len(request.prompt) >= spec.max_positions:
        raise DataError(
            f"the prompt has {len(request.prompt)} tokens and leaves no room in a context of {spec.max_positions}"
        )
    checks = [
        (request.num_samples >= 1, f"num_samples is {request.num_samples}; ask for at least 1"),
        (p.max_tokens is None or p.max_tokens >= 1, f"max_tokens is {p.max_tokens}; ask for at least 1"),
        (0.0 <= p.temperature < float("inf"), f"temperature is {p.temperature}; it must be 0 or more"),
        (0.0 < p.top_p <= 1.0, f"top_p is {p.top_p}; it must be above 0 and at most 1"),
        (0.0 <= p.min_p <= 1.0, f"min_p is {p.min_p}; it must be between 0 and 1"),
        (p.top_k >= -1, f"top_k is {p.top_k}; it must be -1 (off) or a count"),
        (0 < p.repetition_penalty < inf, f"repetition_penalty is {p.repetition_penalty}; it must be above 0"),
        (isfinite(p.presence_penalty), f"presence_penalty is {p.presence_penalty}; it must be a number"),
        (isfinite(p.frequency_penalty), f"frequency_penalty is {p.frequency_penalty}; it must be a number"),
        (all(-inf <= b < inf for b in p.logit_bias.values()), "logit_bias holds NaN or infinity"),
        (all(0 <= t < spec.vocab_size for t in p.logit_bias), "logit_bias names a token outside the vocabulary"),
        (
            all(0 <= k <= spec.vocab_size for k in (request.topk_logprobs, request.topk_prompt_logprobs)),
            f"top-k logprobs: 0 (off) to at most {spec.vocab_size} (the vocabulary)",
        ),
        (not p.stop_strings or has_tokenizer, "stop strings need a tokenizer; this sampler has none"),
        (all(p.stop_strings), "a stop string is empty"),
        (all(_is_text(s) for s in p.stop_strings), "a stop string is not valid Unicode text"),
    ]
    for fine, message in checks:
        if not fine:
            raise DataError(message)


def _is_text(string: str) -> bool:
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True
