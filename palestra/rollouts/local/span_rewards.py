"""Rewards for parts of a turn: from characters, as environments count, to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from palestra.chat import ChatTokenizer
from palestra.chat.detokenizer import token_ranges
from palestra.types.rollouts import LARGEST_REWARD, SpanReward

Offset = Annotated[int, Meta(ge=0)]


class CharSpan(Struct, frozen=True):
    """A part of what the policy said, in characters, and its reward."""

    start: Offset
    end: Offset
    reward: Annotated[float, Meta(ge=-LARGEST_REWARD, le=LARGEST_REWARD)]


def token_spans(spans: Sequence[CharSpan], tokens: Sequence[int], tokenizer: ChatTokenizer) -> list[SpanReward]:
    """Returns the tokens that have a part in each span. One that spells nothing of the text is left out."""
    found, ranges = [], token_ranges(tokenizer, tokens)
    for span in spans:
        inside = [place for place, (start, end) in enumerate(ranges) if end > span.start and start < span.end]
        if inside and span.end > span.start:
            found.append(SpanReward(inside[0], inside[-1] + 1, span.reward))
    return found
