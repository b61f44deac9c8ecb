"""Conversations as rows to train on: what the assistant says is learned, what it answers to is only read.

Owns: where an assistant's turn begins and ends in tokens. Never touches: files, batches.

A row is put together as a rollout is. The prompt is the template's, up to and with the header of the assistant's turn.
The turn is what the template adds to it, up to and with the token that ends a turn. What follows comes from
`ChatTokenizer.observation`: a turn stays in the context as it was said, also with templates that would leave out its
reasoning once another message follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.templates import Messages, Tools
from palestra.training.batches.conversation_files import Conversation
from palestra.types.rollouts import TrainSequence


class Example(Struct):
    sequence: TrainSequence
    """Weights, in `advantages`, are 1 where it is learned from."""
    is_cut: bool
    """It lost its end to the limit."""

    @property
    def trained(self) -> int:
        """Tokens to learn from; may be none."""
        return sum(self.sequence.mask)


def encode_example(
    tokenizer: ChatTokenizer, conversation: Conversation, limit: int, *, last_only: bool = False
) -> Example:
    """The first `limit` tokens. `last_only`: all but the last turn is prompt. Raises ChatError."""
    tokens, mask = _encode(tokenizer, conversation, last_only)
    tokens, mask, is_cut = tokens[:limit], mask[:limit], len(tokens) > limit
    if mask:
        mask[0] = False  # nothing predicts the first token
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
    """The last message as its author draws it behind the prompt, the end of the turn included."""
    whole = tokenizer.encode_chat(messages, tools, add_generation_prompt=False)
    added = _behind(tokenizer, prompt, whole)
    ends = [place for place, token in enumerate(added) if token in tokenizer.stop_ids]
    return added[: ends[-1] + 1] if ends else [*added, tokenizer.turn_end]


def _behind(tokenizer: ChatTokenizer, prompt: Sequence[int], whole: Sequence[int]) -> list[int]:
    """What `whole` has more than `prompt`. A token that lies across the border, as one of two line breaks does where
    a header ends with one and the turn begins with the other, is taken apart."""
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
