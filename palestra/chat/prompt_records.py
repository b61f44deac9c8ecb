"""Records of what is requested, what is cached and what is read."""

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
    """The conversation has no assistant message yet."""
    CONTINUED = "continued"
    """All assistant messages in it were sampled here."""
    BRANCHED = "branched"
    """Only a beginning was sampled here; what comes after it was rendered."""
    UNMATCHED = "unmatched"
    """None of it was sampled here: examples, a conversation of another server, or one whose trace was deleted."""
    GIVEN = "given"
    """None of it was sampled here, but the ids of its beginning came with the request."""


class HistoryMode(StrEnum):
    EXACT = "exact"
    """Tokens that were read and sampled stay as they were."""
    TEMPLATE = "template"
    """The chat template renders the whole conversation again."""


@dataclass(frozen=True, slots=True)
class TokenPrefix:
    """Token ids of a conversation's beginning, from a client that kept them itself."""

    ids: Sequence[int]
    length: int
    """Number of messages; the last of them is the assistant's."""


@dataclass(frozen=True)
class PromptRequest:
    """A request, with everything that its prompt depends on. `content` of messages is text."""

    scope: tuple[str, ...]
    """The scope of conversations, the owner first: those of other scopes are never matched."""
    messages: Sequence[Message]
    tools: Sequence[JsonMapping] | None = None
    template_kwargs: JsonMapping = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """Whether the last message, which is the assistant's, is to be continued."""
    history: HistoryMode | None = None
    """None: exact."""
    prefix: TokenPrefix | None = None
    max_tokens: int | None = None
    """A conversation that certainly has more tokens is not encoded."""

    @cached_property
    def names(self) -> list[bytes]:
        """Names (hashes) of the conversation up to each length, from 0 on."""
        return chain([self.scope, self.tools, self.template_kwargs], self.messages)

    @cached_property
    def spoken(self) -> list[int]:
        """Indexes of the assistant messages."""
        return [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]

    @property
    def lengths(self) -> list[int]:
        """Lengths of the beginnings for which an answer may be cached, the longest first."""
        least = 0 if self.prefix is None else self.prefix.length
        return [place + 1 for place in reversed(self.spoken) if place + 1 >= least]

    @cached_property
    def thoughts(self) -> dict[int, str]:
        """Reasoning by index of the message; clients may leave it out."""
        return {place: text for place in self.spoken if (text := reasoning_of(self.messages[place])) is not None}

    @property
    def end(self) -> int:
        """Index of the answer."""
        return len(self.messages) - self.continue_final_message

    def is_whole(self, length: int) -> bool:
        """Whether the first `length` messages contain all assistant messages before the answer."""
        return all(place < length for place in self.spoken if place < self.end)

    def may_mean(self, turn: CachedTurn, length: int) -> bool:
        """Whether a turn with the same name is what the first `length` messages say."""
        if any(turn.thoughts.get(place) != text for place, text in self.thoughts.items() if place < length):
            return False
        if self.prefix is None:
            return True
        ids, given = turn.ids(), list(self.prefix.ids)
        return ids == given if length == self.prefix.length else ids[: len(given)] == given


@dataclass(frozen=True, slots=True)
class SampleLocation:
    """The location of a sample in a trace."""

    trace_id: str
    turn: int
    sample: int


@dataclass(slots=True, eq=False)
class CachedTurn:
    """A turn: what was read since the previous one, and what was sampled."""

    place: SampleLocation
    parent: CachedTurn | None
    read: array[int]
    sampled: array[int]
    name: bytes
    """Name (hash) of the conversation up to and including this turn."""
    thoughts: Mapping[int, str]
    """Reasoning up to and including this turn, by index of the message; unknown reasoning is missing."""
    begun: int = 0
    """The same as of the prompt."""
    is_open: bool = False
    """Whether its length ended it, and the client has received all that was sampled."""
    drift: bool = False
    """Whether its prompt differed from what the template would have rendered."""

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
    """Turns that the first `length` messages may stand for, the oldest first."""

    length: int = 0
    turns: Sequence[CachedTurn] = ()


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """The key by which an answer is found again after its conversation was evicted."""

    name: bytes
    thoughts: Mapping[int, str]
    """Reasoning that its parent does not have."""


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    parent: CachedTurn | None
    """The turn whose ids the prompt begins with."""
    read: list[int]
    """The rest: what was rendered and encoded for this request."""
    messages: Sequence[Message]
    """The messages of the request, without those that its parent has."""
    match: HistoryMatch
    owner: str
    name: bytes
    """Name (hash) of the conversation up to the answer."""
    thoughts: Mapping[int, str]
    length: int
    """Index of the answer among the messages."""
    beginning: Message | None = None
    """The beginning of the answer, if the request continues its final message."""
    begun: int = 0
    """How many ids at the end are that beginning; an approximate number if it was not sampled here."""
    candidates: int = 0
    """Number of turns that the history may stand for; more than one is ambiguous, and the newest is used."""
    drift: bool = False
    """Whether the template would have rewritten what was read and sampled before; the cached ids are used all the
    same."""

    @property
    def counts(self) -> list[str]:
        """The names under which metrics count this call."""
        return [self.match, *(["ambiguous"] if self.candidates > 1 else ()), *(["drift"] if self.drift else ())]

    def answered(self, message: Message) -> AnswerKey:
        """Returns the key of an answer. `message` is what the client receives; it comes back like this, apart from
        small differences."""
        whole = message if self.beginning is None else join(self.beginning, message)
        thought = reasoning_of(whole)
        thoughts = self.thoughts if thought is None else {**self.thoughts, self.length: thought}
        known = {} if self.parent is None else self.parent.thoughts
        new = {place: text for place, text in thoughts.items() if known.get(place) != text}
        return AnswerKey(extend(self.name, whole), new)
