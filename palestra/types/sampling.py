"""What a sampling request says and what comes back: plain records, no tensors."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class StopReason(StrEnum):
    STOP = "stop"
    """A stop token or stop string ended the sequence; it is part of the tokens."""
    LENGTH = "length"
    """`max_tokens` or the context ended it."""
    ABORT = "abort"


class SamplingParams(Struct, frozen=True, kw_only=True):
    max_tokens: int | None = None
    """None: until something stops it or the context is full."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """-1 (or 0): off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    """None: the model's end-of-sequence ids. Empty: no token stops it."""
    stop_strings: tuple[str, ...] = ()
    min_tokens: int = 0
    """No stop token may be drawn before this many tokens."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    raw_logprobs: bool = False
    """Report log-probabilities of the unscaled model distribution instead of the one at `temperature`."""


class SampleRequest(Struct, frozen=True, kw_only=True):
    prompt: tuple[int, ...]
    params: SamplingParams = SamplingParams()
    num_samples: int = 1
    topk_logprobs: int = 0
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0


class TopLogprobs(Struct, frozen=True):
    """The k likeliest tokens at one position, likeliest first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


class SampledSequence(Struct, kw_only=True):
    tokens: list[int]
    logprobs: list[float]
    """One per token, under the distribution it was drawn from (before top-k/top-p)."""
    stop_reason: StopReason
    topk_logprobs: list[TopLogprobs] = []


class SampleResult(Struct, kw_only=True):
    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """One per prompt token; the first is None: nothing predicts it."""
    topk_prompt_logprobs: list[TopLogprobs | None] | None = None
    cached_prompt_tokens: int = 0
    """Prompt tokens whose keys and values were already in the cache."""
