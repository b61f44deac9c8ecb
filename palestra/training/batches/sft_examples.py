"""Converts conversations to training rows: the assistant's messages are learned, all others are only context.

A row is built in the same way as a rollout. The prompt is the template's, up to and including the header of the
assistant's turn. The turn is what the template adds to it, up to and including the token that ends a turn. What follows
comes from `ChatTokenizer.observation`, so a turn stays in the context unchanged, even with templates that would leave
out its reasoning once another message follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.picture_files import TEXT_ONLY, read_pictures
from palestra.chat.templates import Messages, Tools
from palestra.data.conversations import Conversation, ConversationFile
from palestra.data.errors import DatasetError
from palestra.types.pictures import whole_pictures
from palestra.types.rollouts import TrainSequence


class Example(Struct):
    sequence: TrainSequence
    """The weights, in `advantages`, are 1 for tokens to learn from."""
    is_cut: bool
    """Whether it was cut at the limit."""

    @property
    def trained(self) -> int:
        """Number of tokens to learn from; may be 0."""
        return sum(self.sequence.mask)


def encode_example(
    tokenizer: ChatTokenizer, conversation: Conversation, limit: int, *, last_only: bool = False, source: str = ""
) -> Example:
    """Returns the first `limit` tokens, up to a picture that would be cut. With `last_only` all but the last turn is
    context. `source`: the row, for messages about its pictures. Raises ChatError."""
    messages = conversation.messages
    end = max((place + 1 for place, one in enumerate(messages) if one["role"] == "assistant"), default=0)
    seen = read_pictures(messages[:end], tokenizer.card, opens_files=True, source=source)
    tokens, mask = _encode(tokenizer, replace(conversation, messages=seen.messages), last_only)
    cut, pictures = whole_pictures(seen.placed(tokenizer.pictures, tokens), limit)
    tokens, mask, is_cut = tokens[:cut], mask[:cut], len(tokens) > limit
    if mask:
        mask[0] = False  # the first token is not predicted by anything
    sequence = TrainSequence(
        tokens=tokens,
        mask=mask,
        logprobs=[0.0] * len(tokens),
        advantages=[float(trained) for trained in mask],
        pictures=pictures,
    )
    return Example(sequence, is_cut)


def check_pictures(rows: ConversationFile[Any], tokenizer: ChatTokenizer) -> None:
    """Raises DatasetError if a row has pictures and the model reads text only."""
    if rows.first_picture is not None and tokenizer.card is None:
        raise DatasetError(TEXT_ONLY, rows.first_picture)


def _encode(tokenizer: ChatTokenizer, conversation: Conversation, last_only: bool) -> tuple[list[int], list[bool]]:
    messages, tools = conversation.messages, conversation.tools
    places = [place for place, one in enumerate(messages) if one["role"] == "assistant" and place >= conversation.first]
    tokens: list[int] = []
    mask: list[bool] = []
    before: int | None = None
    for place in places[-1:] if last_only else places:
        prompt = tokenizer.encode_chat(messages[:place], tools)
        read = prompt if before is None else tokenizer.observation(messages[before + 1 : place], tools=tools)
        answer = _turn(tokenizer, prompt, messages[: place + 1], tools)
        tokens += read + answer
        mask += [False] * len(read) + [True] * len(answer)
        before = place
    return tokens, mask


def _turn(tokenizer: ChatTokenizer, prompt: Sequence[int], messages: Messages, tools: Tools | None) -> list[int]:
    """Returns the last message as the policy would sample it after the prompt, including the end of the turn."""
    whole = tokenizer.encode_chat(messages, tools, add_generation_prompt=False)
    added = _behind(tokenizer, prompt, whole)
    ends = [place for place, token in enumerate(added) if token in tokenizer.stop_ids]
    return added[: ends[-1] + 1] if ends else [*added, tokenizer.turn_end]


def _behind(tokenizer: ChatTokenizer, prompt: Sequence[int], whole: Sequence[int]) -> list[int]:
    """Returns what `whole` has after `prompt`. A token that spans the boundary is split, e.g. a token of two line
    breaks where a header ends with the first and the turn begins with the second."""
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    expected = tokenizer.decode(prompt[shared:], skip_special=False)
    for end in range(shared, len(whole) + 1):
        text = tokenizer.decode(whole[shared:end], skip_special=False)
        if text.startswith(expected):
            return [*tokenizer.encode_text(text.removeprefix(expected)), *whole[end:]]
        if not expected.startswith(text):
            break
    raise ChatError(
        "the chat template begins an assistant's turn differently from its generation prompt: after "
        f"{tokenizer.decode(whole[max(0, shared - 8) : shared], skip_special=False)!r} it has "
        f"{tokenizer.decode(whole[shared : shared + 8], skip_special=False)!r} instead of {expected!r}"
    )
