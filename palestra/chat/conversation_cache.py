"""Token-exact conversations: tokens that were read and sampled stay as they were, and only new messages are rendered.

The messages of a request are matched against earlier conversations. The prompt is the cached ids of the longest match,
followed by the tokens of the messages after it; a history that was changed becomes a branch.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from palestra.chat.canonical import Message
from palestra.chat.prompt_builder import prompt_of
from palestra.chat.prompt_records import (
    CachedTurn,
    HistoryMatch,
    HistoryMode,
    MatchingTurns,
    Prompt,
    PromptRequest,
    SampleLocation,
    TokenPrefix,
)
from palestra.chat.tokenizer import ChatTokenizer

__all__ = [
    "CachedTurn",
    "ConversationCache",
    "HistoryMatch",
    "HistoryMode",
    "MatchingTurns",
    "Prompt",
    "PromptRequest",
    "Recall",
    "SampleLocation",
    "SampledReply",
    "StoredTurn",
    "TokenPrefix",
]


@dataclass(frozen=True, slots=True)
class SampledReply:
    message: Message
    """The message as the client received it; it comes back like this, apart from small differences."""
    tokens: Sequence[int]
    place: SampleLocation
    by_length: bool = False
    """Whether its length ended it; otherwise a token or a string did."""


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn as it is stored, and restored after it was evicted. A parent comes before its children."""

    place: SampleLocation
    parent: SampleLocation | None
    read: Sequence[int]
    """Token ids read since its parent; the whole prompt if it has none."""
    sampled: Sequence[int]
    name: bytes
    thoughts: Mapping[int, str]
    """Reasoning that its parent does not have."""
    begun: int
    drift: bool
    by_length: bool


Recall = Callable[[Sequence[bytes]], Iterable[tuple[bytes, Sequence[StoredTurn]]]]
"""Looks up names that are not cached, the longest conversation first, and returns the traces that have one of them."""


@dataclass(slots=True)
class _Conversation:
    owner: str
    used_at: float
    turns: dict[SampleLocation, CachedTurn] = field(default_factory=dict)
    tokens: int = 0


@dataclass(slots=True)
class _Share:
    """The conversations of one owner, the least recently used first."""

    conversations: OrderedDict[str, _Conversation] = field(default_factory=OrderedDict)
    tokens: int = 0


class ConversationCache:
    """A thread-safe cache. A conversation is evicted as a whole, with its branches: the least recently used one of the
    owner who has the most, so that no owner evicts the conversations of other owners."""

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
        self._lock = threading.Lock()  # protects all fields below; never held while a long history or text is processed
        self._live: OrderedDict[str, _Conversation] = OrderedDict()
        """Conversations by trace, the least recently used first."""
        self._shares: dict[str, _Share] = {}
        """Shares by owner."""
        self._turns: dict[bytes, list[CachedTurn]] = {}
        """Turns by name, the oldest first."""
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def tokens(self) -> int:
        return self._tokens

    def prompt(self, tokenizer: ChatTokenizer, request: PromptRequest, recall: Recall | None = None) -> Prompt:
        with self._lock:
            self._let_go()
        found = _find(request, self._named)
        if found.turns:
            with self._lock:
                self._touch(found.turns[-1].place.trace_id)
        missing = [request.names[length] for length in request.lengths if length > found.length]
        for name, turns in recall(missing) if recall is not None and missing else ():
            revived = self._revive(request, turns)
            found = revived if revived.length > found.length else found
            if request.names[found.length] == name:
                break
        return prompt_of(tokenizer, request, found)

    def keep(self, prompt: Prompt, replies: Sequence[SampledReply]) -> None:
        read = array("i", prompt.read)
        turns = [_cached_turn(_answered(prompt, reply, read), prompt.parent) for reply in replies]
        with self._lock:
            if prompt.parent is not None and prompt.parent not in self._turns.get(prompt.parent.name, ()):
                # It was evicted meanwhile.
                turns = [replace(turn, parent=None, read=array("i", prompt.ids)) for turn in turns]
            for turn in turns:
                self._add(prompt.owner, turn)
            self._let_go()

    def _named(self, name: bytes) -> list[CachedTurn]:
        """Looks up one name at a time, so that other requests do not wait while a long history is searched."""
        with self._lock:
            return list(self._turns.get(name, ()))

    def _revive(self, request: PromptRequest, trace: Sequence[StoredTurn]) -> MatchingTurns:
        """Caches the turns of a trace again, and searches them."""
        with self._lock:
            conversation = self._live.get(trace[0].place.trace_id) if trace else None
            turns = {} if conversation is None else dict(conversation.turns)
        names: dict[bytes, list[CachedTurn]] = {}
        for one in trace:
            if one.place not in turns:
                turns[one.place] = _cached_turn(one, None if one.parent is None else turns[one.parent])
            names.setdefault(one.name, []).append(turns[one.place])
        with self._lock:
            for one in trace:
                self._add(request.scope[0], turns[one.place])
            self._let_go()
        return _find(request, lambda name: names.get(name, ()))

    def _add(self, owner: str, turn: CachedTurn) -> None:
        trace_id = turn.place.trace_id
        if trace_id not in self._live:
            self._live[trace_id] = _Conversation(owner, self._clock())
            self._shares.setdefault(owner, _Share()).conversations[trace_id] = self._live[trace_id]
        self._touch(trace_id)
        if turn.place in self._live[trace_id].turns:
            return  # its trace was restored meanwhile, including this turn
        self._live[trace_id].turns[turn.place] = turn
        self._turns.setdefault(turn.name, []).append(turn)
        self._count(trace_id, len(turn))

    def _touch(self, trace_id: str) -> None:
        conversation = self._live.get(trace_id)
        if conversation is None:
            return
        conversation.used_at = self._clock()
        self._live.move_to_end(trace_id)
        self._shares[conversation.owner].conversations.move_to_end(trace_id)

    def _count(self, trace_id: str, tokens: int) -> None:
        conversation = self._live[trace_id]
        conversation.tokens += tokens
        self._shares[conversation.owner].tokens += tokens
        self._tokens += tokens

    def _let_go(self) -> None:
        oldest = self._clock() - self._max_age_s
        while self._live and next(iter(self._live.values())).used_at < oldest:
            self._drop(next(iter(self._live)))
        while len(self._live) > self._max_conversations:
            self._drop(self._oldest_of_the_greatest(lambda share: len(share.conversations)))
        while self._tokens > self._max_tokens:
            self._drop(self._oldest_of_the_greatest(lambda share: share.tokens))

    def _oldest_of_the_greatest(self, size: Callable[[_Share], int]) -> str:
        """Returns the owner with the greatest share; among equals the one whose oldest conversation was used longest
        ago."""

        def rank(share: _Share) -> tuple[int, float]:
            return size(share), -next(iter(share.conversations.values())).used_at

        return next(iter(max(self._shares.values(), key=rank).conversations))

    def _drop(self, trace_id: str) -> None:
        conversation = self._live[trace_id]
        self._count(trace_id, -conversation.tokens)
        del self._live[trace_id]
        share = self._shares[conversation.owner]
        del share.conversations[trace_id]
        if not share.conversations:
            del self._shares[conversation.owner]
        for turn in conversation.turns.values():
            same = self._turns[turn.name]
            same.remove(turn)
            if not same:
                del self._turns[turn.name]


def _find(request: PromptRequest, named: Callable[[bytes], Sequence[CachedTurn]]) -> MatchingTurns:
    """Returns the longest beginning that ends with a cached turn, and the turns that it may be."""
    for length in request.lengths:
        if turns := [turn for turn in named(request.names[length]) if request.may_mean(turn, length)]:
            return MatchingTurns(length, turns)
    return MatchingTurns()


def _answered(prompt: Prompt, reply: SampledReply, read: array[int]) -> StoredTurn:
    answer, parent = prompt.answered(reply.message), prompt.parent
    return StoredTurn(
        place=reply.place,
        parent=None if parent is None else parent.place,
        read=read,
        sampled=reply.tokens,
        name=answer.name,
        thoughts=answer.thoughts,
        begun=prompt.begun,
        drift=prompt.drift,
        by_length=reply.by_length,
    )


def _cached_turn(one: StoredTurn, parent: CachedTurn | None) -> CachedTurn:
    return CachedTurn(
        place=one.place,
        parent=parent,
        read=array("i", one.read),
        sampled=array("i", one.sampled),
        name=one.name,
        thoughts={**({} if parent is None else parent.thoughts), **one.thoughts},
        begun=one.begun,
        is_open=one.by_length,
        drift=one.drift,
    )
