"""Token-exact conversations: what was read and sampled stays as it was, only what is new is rendered.

A request's messages are matched against what was said before. Its prompt is the ids held for the longest match and the
tokens of the messages after it; a history that was changed becomes a branch.
Owns: the ids held, finding them again, how many are held. Never touches: models, HTTP, databases.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from palestra.chat.canonical import Message, chain, extend, reasoning_of
from palestra.chat.tokenizer import ChatTokenizer


class Match(StrEnum):
    NEW = "new"
    """Nobody has answered in it yet."""
    CONTINUED = "continued"
    """Everything the assistant said in it was sampled here."""
    BRANCHED = "branched"
    """Only a beginning was; what comes after it was rendered."""
    UNMATCHED = "unmatched"
    """None of it: examples, a conversation of another server, or one that was let go."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, with everything its prompt depends on. `content` of messages is text."""

    scope: tuple[str, ...]
    """Whose conversations these are: those of other scopes do not exist for it."""
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """Of a sample in a trace."""

    trace_id: str
    turn: int
    sample: int


@dataclass(slots=True, eq=False)
class Held:
    """A turn: what was read since the one before it, and what was sampled."""

    place: Place
    parent: Held | None
    read: array[int]
    sampled: array[int]
    name: bytes
    """Of the conversation up to and with this turn."""
    reasoning: Mapping[int, str]
    """By the place of the message; what is not known to have been thought is missing."""

    def ids(self) -> list[int]:
        parts: list[array[int]] = []
        turn: Held | None = self
        while turn is not None:
            parts += (turn.sampled, turn.read)
            turn = turn.parent
        return [token for part in reversed(parts) for token in part]


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: list[int]
    parent: Held | None
    """The turn whose ids it begins with."""
    read: list[int]
    """The rest: all that was rendered and encoded for this request."""
    match: Match
    candidates: int
    """Turns that the history may mean; more than one is ambiguous, and the newest was taken."""
    name: bytes
    reasoning: Mapping[int, str]
    length: int
    """In messages."""


@dataclass(frozen=True, slots=True)
class Reply:
    message: Message
    """As the client was told: it comes back like this, more or less."""
    tokens: Sequence[int]
    place: Place


@dataclass(slots=True)
class _Conversation:
    used_at: float
    turns: list[Held] = field(default_factory=list)
    tokens: int = 0


class Conversations:
    """For any thread. A conversation, with its branches, is let go as a whole: the least recently used first."""

    def __init__(
        self,
        *,
        max_conversations: int,
        max_tokens: int,
        max_age_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_conversations, self._max_tokens, self._max_age_s = max_conversations, max_tokens, max_age_s
        self._clock = clock
        self._lock = threading.Lock()  # protects the three below
        self._live: OrderedDict[str, _Conversation] = OrderedDict()
        """By trace, the least recently used first."""
        self._turns: dict[bytes, list[Held]] = {}
        """By name, the oldest first."""
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def tokens(self) -> int:
        return self._tokens

    def prompt(self, tokenizer: ChatTokenizer, ask: Ask) -> Prompt:
        names = chain([ask.scope, ask.tools, ask.template_kwargs], ask.messages)
        spoken = [i for i, message in enumerate(ask.messages) if message["role"] == "assistant"]
        given = {i: text for i in spoken if (text := reasoning_of(ask.messages[i])) is not None}
        length, found = self._find(names, spoken, given)
        if not found:
            ids = tokenizer.encode_chat(ask.messages, ask.tools, ask.add_generation_prompt, **ask.template_kwargs)
            match = Match.UNMATCHED if spoken else Match.NEW
            return Prompt(ids, None, ids, match, 0, names[-1], given, len(ask.messages))
        parent = found[-1]
        read = tokenizer.observation(ask.messages[length:], ask.add_generation_prompt, ask.tools, **ask.template_kwargs)
        if not parent.sampled or parent.sampled[-1] != tokenizer.turn_end:
            read = [tokenizer.turn_end, *read]  # its length or a stop string ended the turn: nobody drew its end
        match = Match.CONTINUED if length == spoken[-1] + 1 else Match.BRANCHED
        known = dict(parent.reasoning) | {i: text for i, text in given.items() if i >= length}
        return Prompt([*parent.ids(), *read], parent, read, match, len(found), names[-1], known, len(ask.messages))

    def keep(self, prompt: Prompt, replies: Sequence[Reply]) -> None:
        with self._lock:
            for reply in replies:
                self._add(prompt, reply)
            self._let_go()

    def _find(self, names: Sequence[bytes], spoken: Sequence[int], given: Mapping[int, str]) -> tuple[int, list[Held]]:
        """The longest beginning that ends with a turn of ours, and those it may be."""
        with self._lock:
            self._let_go()
            for i in reversed(spoken):
                thought = {place: text for place, text in given.items() if place <= i}
                found = [
                    turn
                    for turn in self._turns.get(names[i + 1], ())
                    if all(turn.reasoning.get(place) == text for place, text in thought.items())
                ]
                if found:
                    self._touch(found[-1].place.trace_id)
                    return i + 1, found
        return 0, []

    def _add(self, prompt: Prompt, reply: Reply) -> None:
        parent, read = prompt.parent, prompt.read
        if parent is not None and parent not in self._turns.get(parent.name, ()):
            parent, read = None, prompt.ids  # it was let go meanwhile
        thought = reasoning_of(reply.message)
        turn = Held(
            place=reply.place,
            parent=parent,
            read=array("i", read),
            sampled=array("i", reply.tokens),
            name=extend(prompt.name, reply.message),
            reasoning=prompt.reasoning if thought is None else {**prompt.reasoning, prompt.length: thought},
        )
        conversation = self._live.setdefault(reply.place.trace_id, _Conversation(self._clock()))
        self._touch(reply.place.trace_id)
        conversation.turns.append(turn)
        self._turns.setdefault(turn.name, []).append(turn)
        size = len(turn.read) + len(turn.sampled)
        conversation.tokens += size
        self._tokens += size

    def _touch(self, trace_id: str) -> None:
        self._live[trace_id].used_at = self._clock()
        self._live.move_to_end(trace_id)

    def _let_go(self) -> None:
        oldest = self._clock() - self._max_age_s
        while self._live and (
            len(self._live) > self._max_conversations
            or self._tokens > self._max_tokens
            or next(iter(self._live.values())).used_at < oldest
        ):
            _, conversation = self._live.popitem(last=False)
            self._tokens -= conversation.tokens
            for turn in conversation.turns:
                same = self._turns[turn.name]
                same.remove(turn)
                if not same:
                    del self._turns[turn.name]
