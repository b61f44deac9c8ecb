"""Converts conversations to training rows: the assistant's messages are learned, all others are only context.

A row is built in the same way as a rollout. The prompt is the template's, up to and including the header of the
assistant's turn. The turn is what the template adds to it, up to and including the token that ends a turn. What follows
comes from `ChatTokenizer.observation`, so a turn stays in the context unchanged, even with templates that would leave
out its reasoning once another message follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.templates import Messages, Tools
from palestra.data.conversations import Conversation
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
    tokenizer: ChatTokenizer, conversation: Conversation, limit: int, *, last_only: bool = False
) -> Example:
    """Returns the first `limit` tokens. With `last_only` all but the last turn is context. Raises ChatError."""
    tokens, mask = _encode(tokenizer, conversation, last_only)
    tokens, mask, is_cut = tokens[:limit], mask[:limit], len(tokens) > limit
    if mask:
        mask[0] = False  # the first token is not predicted by anything
    sequence = TrainSequence(
        tokens=tokens, mask=mask, logprobs=[0.0] * len(tokens), advantages=[float(trained) for trained in mask]
    )
    return Example(sequence, is_cut)


def _encode(tokenizer: ChatTokenizer, conversation: Conversation, last_only: bool) -> tuple[list[int], list[bool]]:
    messages, tools = conversation.messages, conversation.tools
    places = [place for place, one in enumerate(messages) if one["role"] == "assistant" and place >= conversation.first]
    tokens: list[int] = []
    mask: list[bool] = []
    before: int | None = None
    for place in places[-1:] if last_only else places:
        prompt = tokenizer.encode_chat(messages[:place], tools)
        read = prompt if before is None else tokenizer.observation(messages[before + 1 : place], tools=tools)
        said = _turn(tokenizer, prompt, messages[: place + 1], tools)
        tokens += read + said
        mask += [False] * len(read) + [True] * len(said)
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
