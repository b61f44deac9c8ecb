"""Converts answers of vLLM's /v1/completions to our records: whole, or joined from a stream."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from palestra.server.replicas.errors import ReplicaLost
from palestra.types.sampling import SampledSequence, StopReason, TopLogprobs

ID_PREFIX = "token_id:"


class VllmLogprobs(Struct):
    tokens: list[str]
    """Tokens in the form `token_id:17`."""
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """Includes the token's own."""


class ScoredToken(Struct):
    logprob: float


class VllmChoice(Struct):
    index: int
    finish_reason: str | None = None
    logprobs: VllmLogprobs | None = None
    prompt_logprobs: list[dict[str, ScoredToken] | None] | None = None


class PromptDetails(Struct):
    cached_tokens: int | None = None


class VllmUsage(Struct):
    prompt_tokens_details: PromptDetails | None = None


class VllmErrorBody(Struct):
    """The body of an error."""

    message: str


class VllmCompletion(Struct):
    """An answer, or a part of one."""

    choices: list[VllmChoice] = []
    usage: VllmUsage | None = None
    error: VllmErrorBody | None = None


COMPLETION = msgspec.json.Decoder(VllmCompletion)


class VllmPromptScores(Struct):
    """Logprobs of a prompt's tokens; the first has none."""

    logprobs: list[float | None]
    top: list[TopLogprobs | None]

    @classmethod
    def of(
        cls, prompt_logprobs: list[dict[str, ScoredToken] | None], prompt: Sequence[int], top: int
    ) -> VllmPromptScores:
        if len(prompt_logprobs) != len(prompt):
            raise ReplicaLost(f"vLLM scored {len(prompt_logprobs)} tokens of a prompt of {len(prompt)}")
        found = [
            None if p is None else {int(token): scored.logprob for token, scored in p.items()} for p in prompt_logprobs
        ]
        return cls(
            [None if f is None else f[token] for f, token in zip(found, prompt, strict=True)],
            [None if f is None else _likeliest(f, top) for f in found],
        )


class GrowingSequences:
    """The sequences of one request while they grow."""

    def __init__(self, prompt: Sequence[int], count: int, *, top: int, prompt_top: int = 0):
        self._prompt, self._prompt_top = prompt, prompt_top
        self.rows = [SampledSequence(tokens=[], logprobs=[], stop_reason=StopReason.ABORT) for _ in range(count)]
        self._top = top
        self._ended = 0
        self.cached_tokens = 0
        self.prompt: VllmPromptScores | None = None

    def add(self, part: VllmCompletion) -> None:
        if part.error is not None:
            raise ReplicaLost(f"vLLM gave up: {part.error.message}")
        if part.usage is not None and part.usage.prompt_tokens_details is not None:
            self.cached_tokens = part.usage.prompt_tokens_details.cached_tokens or 0
        for choice in part.choices:
            self._add(choice)

    def _add(self, choice: VllmChoice) -> None:
        row, logprobs = self.rows[choice.index], choice.logprobs
        if logprobs is not None:
            row.tokens += [_token_id(token) for token in logprobs.tokens]
            row.logprobs += logprobs.token_logprobs
            if self._top:
                row.topk_logprobs += [_likeliest(_by_id(found), self._top) for found in logprobs.top_logprobs]
        if choice.finish_reason is not None:
            row.stop_reason = _stop_reason(choice.finish_reason)
            self._ended += 1
        if choice.prompt_logprobs is not None:
            self.prompt = self.prompt or VllmPromptScores.of(choice.prompt_logprobs, self._prompt, self._prompt_top)

    def check_whole(self) -> None:
        if self._ended != len(self.rows) or any(len(r.tokens) != len(r.logprobs) for r in self.rows):
            raise ReplicaLost("vLLM's answer ended before the sequences did")


def _likeliest(found: dict[int, float], count: int) -> TopLogprobs:
    ordered = sorted(found.items(), key=lambda pair: -pair[1])[:count]
    return TopLogprobs(tuple(token for token, _ in ordered), tuple(logprob for _, logprob in ordered))


def _by_id(found: dict[str, float]) -> dict[int, float]:
    return {_token_id(token): logprob for token, logprob in found.items()}


def _token_id(token: str) -> int:
    if not token.startswith(ID_PREFIX):
        raise ReplicaLost(f"vLLM returned {token!r} where {ID_PREFIX}… was requested; is it older than 0.10?")
    return int(token[len(ID_PREFIX) :])


def _stop_reason(finish_reason: str) -> StopReason:
    try:
        return StopReason(finish_reason)
    except ValueError:
        raise ReplicaLost(f"vLLM ended a sequence with {finish_reason!r}") from None
