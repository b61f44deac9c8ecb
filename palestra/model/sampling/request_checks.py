"""Is a sampling request sound? Everything is refused here, before it can disturb a batch."""

from __future__ import annotations

from math import inf, isfinite

from palestra.model.errors import DataError
from palestra.model.loading.spec import ModelSpec
from palestra.model.sampling.prompt_logprobs import TargetCells
from palestra.types import MAX_GRAMMAR, MAX_TEMPERATURE, Grammar, SampleRequest, SamplingParams

MAX_ALTERNATIVES = 1 << 22  # of one request: 64 bytes each while they are gathered


def check_request(request: SampleRequest, spec: ModelSpec, *, has_tokenizer: bool) -> None:
    """Raises DataError with the first thing that is wrong, and what would be right."""
    p, vocab = request.params, spec.vocab_size
    if not request.prompt:
        raise DataError("the prompt has no tokens; send at least one, such as the model's start token")
    if {*map(type, request.prompt)} != {int}:
        raise DataError("prompt: every token must be a whole number")
    if not 0 <= min(request.prompt) <= max(request.prompt) < vocab:
        raise DataError(f"prompt: a token id is outside the vocabulary of {vocab}")
    if len(request.prompt) >= spec.max_positions:
        raise DataError(
            f"the prompt has {len(request.prompt)} tokens, which leaves no room in a context of {spec.max_positions}"
        )
    # Messages are put together only for a request that is refused: thousands may come at once.
    checks: list[tuple[bool, str, object]] = [
        (request.num_samples >= 1, "num_samples is {}; ask for at least 1", request.num_samples),
        (p.max_tokens is None or p.max_tokens >= 1, "max_tokens is {}; ask for at least 1", p.max_tokens),
        (
            0.0 <= p.temperature <= MAX_TEMPERATURE,
            f"temperature is {{}}; it must be from 0 to {MAX_TEMPERATURE:g}",
            p.temperature,
        ),
        (0.0 < p.top_p <= 1.0, "top_p is {}; it must be above 0 and at most 1", p.top_p),
        (0.0 <= p.min_p <= 1.0, "min_p is {}; it must be between 0 and 1", p.min_p),
        (p.top_k >= -1, "top_k is {}; it must be -1 (off) or a count", p.top_k),
        (0 < p.repetition_penalty < inf, "repetition_penalty is {}; it must be above 0", p.repetition_penalty),
        (isfinite(p.presence_penalty), "presence_penalty is {}; it must be a number", p.presence_penalty),
        (isfinite(p.frequency_penalty), "frequency_penalty is {}; it must be a number", p.frequency_penalty),
        (not p.logit_bias or _is_bias(p.logit_bias), "logit_bias holds NaN or infinity", None),
        (
            not p.logit_bias or 0 <= min(p.logit_bias) <= max(p.logit_bias) < vocab,
            "logit_bias names a token outside the vocabulary",
            None,
        ),
        (
            0 <= request.topk_logprobs <= vocab and 0 <= request.topk_prompt_logprobs <= vocab,
            "top-k logprobs: 0 (off) to at most {} (the vocabulary)",
            vocab,
        ),
        (
            _alternatives(request, spec) <= MAX_ALTERNATIVES,
            "the top-k logprobs asked for are more than {} cells; ask for a smaller k, fewer samples or fewer tokens",
            MAX_ALTERNATIVES,
        ),
        (
            0 <= request.prompt_alt_tokens_k <= vocab,
            "prompt_alt_tokens_k: 0 (off) to at most {} (the vocabulary)",
            vocab,
        ),
        (not p.stop_strings or has_tokenizer, "stop strings need a tokenizer; this sampler has none", None),
        (request.grammar is None or has_tokenizer, "a grammar needs a tokenizer; this sampler has none", None),
        (all(p.stop_strings), "a stop string is empty", None),
        (not p.stop_strings or all(map(_is_text, p.stop_strings)), "a stop string is not valid Unicode text", None),
    ]
    for fine, message, value in checks:
        if not fine:
            raise DataError(message.format(value))
    if request.grammar is not None:
        _check_grammar(request.grammar, p)
    _check_prompt_scores(request, vocab)


def _check_grammar(grammar: Grammar, params: SamplingParams) -> None:
    """Whether it can be followed is known when it is compiled."""
    size = len(grammar.text) + len(grammar.around)
    if not size <= MAX_GRAMMAR:
        raise DataError(grammar.refusal(f"the grammar has {size} characters; at most {MAX_GRAMMAR} are followed"))
    if not _is_text(grammar.text + grammar.around):
        raise DataError(grammar.refusal("the grammar is not valid Unicode text"))
    if -inf in params.logit_bias.values():
        raise DataError("a logit_bias of -infinity may leave no token that the grammar allows; send -100")


def _check_prompt_scores(request: SampleRequest, vocab: int) -> None:
    last_n, rows = request.prompt_logprobs_last_n, len(request.prompt) - 1
    if last_n is not None:
        if not 1 <= last_n <= rows:
            raise DataError(
                f"prompt_logprobs_last_n is {last_n}; with a prompt of {len(request.prompt)} tokens it must be from 1 "
                f"to {rows} (nothing predicts the first token)"
            )
        if not request.prompt_logprobs:
            raise DataError("prompt_logprobs_last_n needs prompt_logprobs; request those too")
    if request.target_prompt_logprobs is not None:
        TargetCells.of(request.target_prompt_logprobs, rows, vocab)


def _is_bias(bias: dict[int, float]) -> bool:
    return all(-inf <= b < inf for b in bias.values())


def _alternatives(request: SampleRequest, spec: ModelSpec) -> int:
    """Token and log-probability pairs that the answer would hold."""
    longest = spec.max_positions - len(request.prompt)
    drawn = min(request.params.max_tokens or longest, longest) * request.num_samples * request.topk_logprobs
    return drawn + len(request.prompt) * (request.topk_prompt_logprobs + request.prompt_alt_tokens_k)


def _is_text(string: str) -> bool:
    try:
        string.encode()
    except UnicodeEncodeError:
        return False
    return True
