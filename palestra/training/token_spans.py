"""Aligns the tokens of two tokenizers that spell the same text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from palestra.chat import ChatTokenizer
from palestra.chat.detokenizer import token_ranges


class TokenSpan(NamedTuple):
    """Tokens of both that spell the same part of the text; places as of a slice."""

    student: tuple[int, int]
    teacher: tuple[int, int]


def shared_spans(
    student: ChatTokenizer, student_tokens: Sequence[int], teacher: ChatTokenizer, teacher_tokens: Sequence[int]
) -> list[TokenSpan]:
    """Returns the shortest spans, in order. The tokens that end a turn are a span of their own, if both have one. What
    follows the last shared boundary is in no span."""
    own, own_end = _without_end(student_tokens, student.stop_ids)
    other, other_end = _without_end(teacher_tokens, teacher.stop_ids)
    own_ends, other_ends = _ends(student, own), _ends(teacher, other)
    spans, before = [], (0, 0)
    for length in sorted(own_ends.keys() & other_ends.keys()):
        here = own_ends[length] + 1, other_ends[length] + 1
        if here[0] > before[0] and here[1] > before[1]:
            spans.append(TokenSpan((before[0], here[0]), (before[1], here[1])))
            before = here
    if own_end and other_end:
        spans.append(TokenSpan((len(own), len(student_tokens)), (len(other), len(other) + 1)))
    return spans


def _without_end(tokens: Sequence[int], stops: Sequence[int]) -> tuple[Sequence[int], bool]:
    return (tokens[:-1], True) if tokens and tokens[-1] in stops else (tokens, False)


def _ends(tokenizer: ChatTokenizer, tokens: Sequence[int]) -> dict[int, int]:
    """The last token that ends at each length of the text, in characters."""
    ranges = token_ranges(tokenizer, tokens, keep_special=True)
    return {end: place for place, (_, end) in enumerate(ranges)}
