"""What is asked, what is held and what is read, as records.

Owns: what a prompt depends on, when a turn is what a history says, what an answer is found by. Never touches: tokens'
meaning, templates.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from palestra.chat.canonical import Message, chain, extend, join, reasoning_of
from palestra.util.json_types import JsonMapping


class HistoryMatch(StrEnum):
    NEW = "new"
    """Nobody has answered in it yet."""
    CONTINUED = "continued"
    """Everything the assistant said in it was sampled here."""
    BRANCHED = "branched"
    """Only a beginning was; what comes after it was rendered."""
    UNMATCHED = "unmatched"
    """None of it: examples, a conversation of another server, or one whose trace is gone."""
    GIVEN = "given"
    """None of it, but the ids of its beginning came with the request."""


class HistoryMode(StrEnum):
    EXACT = "exact"
    """What was read and sampled stays as it was."""
    TEMPLATE = "template"
    """The chat template renders all of it anew."""


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """Ids of a conversation's beginning, from a client that kept them itself."""

    ids: Sequence[int]
    length: int
    """In messages; the last of them is the assistant's."""


@dataclass(frozen=True)
class PromptRequest:
    """A request, with everything its prompt depends on. `content` of messages is text."""

    scope: tuple[str, ...]
    """Whose conversations these are, the owner first: those of other scopes do not exist for it."""
    messages: Sequence[Message]
    tools: Sequence[JsonMapping] | None = None
    template_kwargs: JsonMapping = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The last message, the assistant's, is only a beginning."""
    history: HistoryMode | None = None
    """None: exact."""
    prefix: TokenPrefix | None = None
    max_tokens: int | None = None
    """What is certain to have more is not encoded."""

    @cached_property
    def names(self) -> list[bytes]:
        """For each length from 0 on, of the conversation up to there."""
        return chain([self.scope, self.tools, self.template_kwargs], self.messages)

    @cached_property
    def spoken(self) -> list[int]:
        """Places of what the assistant said."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def lengths(self) -> list[int]:
        """Lengths of the beginnings that an answer may be held for, the longest first."""
        least = 0 if self.prefix is None else self.prefix.length
        return [place + 1 for place in reversed(self.spoken) if place + 1 >= least]

    @cached_property
    def thoughts(self) -> dict[int, str]:
        """By place; clients leave them out."""
        return {place: text for place in self.spoken if (text := reasoning_of(self.messages[place])) is not None}

    @property
    def end(self) -> int:
        """The place of the answer."""
        return len(self.messages) - self.continue_final_message

    def is_whole(self, length: int) -> bool:
        """Whether the first `length` messages have all that the assistant said before the answer."""
        return all(place < length for place in self.spoken if place < self.end)

    def may_mean(self, turn: CachedTurn, length: int) -> bool:
        """Whether a turn of the same name is what its first messages say."""
        if any(turn.thoughts.get(place) != text for place, text in self.thoughts.items() if place < length):
            return False
        if self.prefix is None:
            return True
        ids, given = turn.ids(), list(self.prefix.ids)
        return ids == given if length == self.prefix.length else ids[: len(given)] == given


@dataclass(frozen=True, slots=True)
class SampleLocation:
    """Where a sample is in a trace."""

    trace_id: str
    turn: int
    sample: int


@dataclass(slots=True, eq=False)
class CachedTurn:
    """A turn: what was read since the one before it, and what was sampled."""

    place: SampleLocation
    parent: CachedTurn | None
    read: array[int]
    sampled: array[int]
    name: bytes
    """Name of the conversation up to and with this turn."""
    thoughts: Mapping[int, str]
    """Up to and with this turn, by the place of the message; what is not known to have been thought is missing."""
    begun: int = 0
    """As its prompt's."""
    is_open: bool = False
    """Its length ended it, and nothing that was sampled is kept from the client."""
    drift: bool = False
    """Whether its prompt was another than the template would have written."""

    def __len__(self) -> int:
        return len(self.read) + len(self.sampled)

    def ids(self) -> list[int]:
        parts: list[array[int]] = []
        turn: CachedTurn | None = self
        while turn is not None:
            parts += (turn.sampled, turn.read)
            turn = turn.parent
        whole = array("i")
        for part in reversed(parts):
            whole.extend(part)
        return whole.tolist()


@dataclass(frozen=True, slots=True)
class MatchingTurns:
    """Turns that the first `length` messages may mean, the oldest first."""

    length: int = 0
    turns: Sequence[CachedTurn] = ()


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """What an answer is found again by, once its conversation was let go."""

    name: bytes
    thoughts: Mapping[int, str]
    """Those that its parent does not know of."""


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    parent: CachedTurn | None
    """The turn whose ids it begins with."""
    read: list[int]
    """The rest: what was rendered and encoded for this request."""
    messages: Sequence[Message]
    """The request's, without those that its parent has."""
    match: HistoryMatch
    owner: str
    name: bytes
    """Name of the conversation up to the answer."""
    thoughts: Mapping[int, str]
    length: int
    """In messages: the place of the answer."""
    beginning: Message | None = None
    """The beginning of the answer, where the request continues its final message."""
    begun: int = 0
    """How many of the ids, at their end, are that beginning; more or less, where it was not sampled here."""
    candidates: int = 0
    """Turns that the history may mean; more than one is ambiguous, and the newest was taken."""
    drift: bool = False
    """The template would have rewritten what was read and sampled before; the held ids stand."""

    @property
    def counts(self) -> list[str]:
        """What this call counts as, in metrics."""
        return [self.match, *(["ambiguous"] if self.candidates > 1 else ()), *(["drift"] if self.drift else ())]

    def answered(self, message: Message) -> AnswerKey:
        """`message`: as the client is told. It comes back like this, more or less."""
        whole = message if self.beginning is None else join(self.beginning, message)
        thought = reasoning_of(whole)
        thoughts = self.thoughts if thought is None else {**self.thoughts, self.length: thought}
        known = {} if self.parent is None else self.parent.thoughts
        new = {place: text for place, text in thoughts.items() if known.get(place) != text}
        return AnswerKey(extend(self.name, whole), new)
