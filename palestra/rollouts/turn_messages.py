"""Turns of a rollout as messages for people to read: tokens as text, with the names of pictures where they stand."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.chat import ChatTokenizer
from palestra.chat.pictures import SCHEME
from palestra.types.pictures import PromptPicture
from palestra.types.rollouts import Message, Rollout
from palestra.util.json_types import JsonObject
from palestra.util.picture_parts import url_part


def turn_messages(rollout: Rollout, tokenizer: ChatTokenizer) -> list[Message]:
    """The messages behind the prompt."""
    messages: list[Message] = []
    at = len(rollout.prompt)
    for turn in rollout.turns:
        if turn.observation:
            content = shown_tokens(tokenizer, turn.observation, at, rollout.pictures)
            messages.append({"role": "user", "content": content})
        messages.append({"role": "assistant", "content": turn.text})
        at += len(turn.observation) + len(turn.tokens)
    return messages


def shown_tokens(
    tokenizer: ChatTokenizer, tokens: Sequence[int], start: int, pictures: Sequence[PromptPicture]
) -> str | list[JsonObject]:
    """The content of a message: tokens, which begin at `start` of their conversation, as text, with pictures where
    they stand."""
    parts: list[JsonObject] = []
    at, end = start, start + len(tokens)
    inside = [one for one in pictures if start <= one.start < end]
    if not inside:
        return tokenizer.decode(tokens)
    for one in inside:
        parts += [*_text(tokenizer, tokens[at - start : one.start - start]), picture_part(one)]
        at = one.end
    return [*parts, *_text(tokenizer, tokens[at - start :])]


def _text(tokenizer: ChatTokenizer, tokens: Sequence[int]) -> list[JsonObject]:
    text = tokenizer.decode(tokens)
    return [{"type": "text", "text": text}] if text else []


def picture_part(picture: PromptPicture) -> JsonObject:
    return url_part(f"{SCHEME}{picture.file.digest}")
