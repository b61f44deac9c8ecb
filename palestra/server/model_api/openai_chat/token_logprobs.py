"""Writes tokens and logprobs in the formats of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

from palestra.chat import ChatTokenizer
from palestra.server.model_api.openai_chat.events import SampledToken
from palestra.types.openai import LogprobEntry, TextLogprobs
from palestra.types.sampling import SampleResult, TopLogprobs

LOWEST = -9999.0  # what OpenAI writes for an impossible token; JSON has no infinity


class RankedToken(TypedDict):
    """A token of a prompt, or one that was likely in its place, as vLLM returns it."""

    logprob: float
    rank: int | None
    """None if it is not among the most likely ones."""
    decoded_token: str


PromptCell: TypeAlias = dict[str, RankedToken]
"""By token ids, as text."""


@dataclass(frozen=True, slots=True)
class TokenNames:
    tokenizer: ChatTokenizer
    as_ids: bool
    """vLLM's `return_tokens_as_token_ids`."""

    def of(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.text(token)

    def text(self, token: int) -> str:
        return self.tokenizer.decode([token], skip_special=False)

    def bytes(self, token: int) -> list[int] | None:
        """Returns the bytes of a token; None for one that is a part of a character."""
        text = self.text(token)
        return None if "\ufffd" in text else list(text.encode())

    # Chat

    def entries(self, tokens: Sequence[SampledToken]) -> list[LogprobEntry]:
        return [
            {
                **self._entry(one.token, one.logprob),
                "top_logprobs": [self._entry(*pair) for pair in _pairs(one.top)] if one.top is not None else [],
            }
            for one in tokens
        ]

    def _entry(self, token: int, logprob: float) -> LogprobEntry:
        return {"token": self.of(token), "logprob": max(logprob, LOWEST), "bytes": self.bytes(token)}

    # Text

    def columns(self, tokens: Sequence[SampledToken], offset: int = 0) -> TextLogprobs:
        """`offset` is that of the first token in the text."""
        names = [self.of(one.token) for one in tokens]
        offsets: list[int] = []
        for one in tokens:
            offsets.append(offset)
            offset += len(self.text(one.token))
        with_top = any(one.top is not None for one in tokens)
        return {
            "tokens": names,
            "token_logprobs": [max(one.logprob, LOWEST) for one in tokens],
            "top_logprobs": [self._row(one.top) for one in tokens] if with_top else None,
            "text_offset": offsets,
        }

    def _row(self, top: TopLogprobs | None) -> dict[str, float] | None:
        return None if top is None else {self.of(token): max(logprob, LOWEST) for token, logprob in _pairs(top)}

    # Prompts, as vLLM returns them

    def prompt_logprobs(self, prompt: Sequence[int], result: SampleResult) -> list[PromptCell | None]:
        """Returns, for each token but the first, the token itself and the most likely ones in its place."""
        logprobs = result.prompt_logprobs or [None] * len(prompt)
        alternatives = result.topk_prompt_logprobs or [None] * len(prompt)
        return [
            None if logprob is None else self._cell(token, logprob, top)
            for token, logprob, top in zip(prompt, logprobs, alternatives, strict=True)
        ]

    def _cell(self, token: int, logprob: float, top: TopLogprobs | None) -> PromptCell:
        """Returns one cell. The rank of a token is unknown if it is not among the most likely ones."""
        ranked = list(_pairs(top))
        cell: PromptCell = {
            str(one): {"logprob": max(p, LOWEST), "rank": i + 1, "decoded_token": self.text(one)}
            for i, (one, p) in enumerate(ranked)
        }
        own: RankedToken = {"logprob": max(logprob, LOWEST), "rank": None, "decoded_token": self.text(token)}
        return {str(token): cell.pop(str(token), own), **cell}


def _pairs(top: TopLogprobs | None) -> list[tuple[int, float]]:
    return [] if top is None else list(zip(top.token_ids, top.logprobs, strict=True))
