"""The conversations of a server: cached in memory, and read back from the traces once they were evicted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from sqlalchemy import Connection

from palestra.chat import ChatError, ChatTokenizer
from palestra.chat.conversation_cache import (
    ConversationCache,
    HistoryMode,
    Prompt,
    PromptRequest,
    SampledReply,
    SampleLocation,
    StoredTurn,
)
from palestra.chat.errors import TooLongError
from palestra.config.serve import ServeConfig
from palestra.server.model_api.errors import invalid, too_long
from palestra.store import Store
from palestra.store.queries import traces as rows
from palestra.store.queries.traces import FoundAnswer
from palestra.types.sampling import StopReason

MAX_RECALLED = 8  # traces read for one name: they differ in their reasoning, and the newest is usually the right one


class ConversationStore:
    """Call `prompt` before a call is sampled. Afterwards its turn is stored in a trace, as `TracedCall.of_chat(prompt,
    …)`, and then `keep` caches it here; both use the same name for the answer, so a restart or a full memory loses
    nothing."""

    def __init__(self, config: ServeConfig, store: Store):
        self._store = store
        self._history = HistoryMode(config.history)
        self._memory = ConversationCache(
            max_conversations=config.limits.max_conversations,
            max_tokens=config.limits.max_conversation_tokens,
            max_age_s=config.keep_conversations_s,
        )

    async def prompt(
        self, tokenizer: ChatTokenizer, make_request: Callable[[], PromptRequest], *, max_tokens: int | None = None
    ) -> Prompt:
        """Builds a prompt in a thread; `make_request` is called there, too. A conversation that certainly has more than
        `max_tokens` is refused before it is encoded."""
        return await asyncio.to_thread(self._prompt, tokenizer, make_request, max_tokens)

    def _prompt(
        self, tokenizer: ChatTokenizer, make_request: Callable[[], PromptRequest], max_tokens: int | None
    ) -> Prompt:
        given = make_request()
        request = replace(given, history=given.history or self._history, max_tokens=max_tokens)
        try:
            return self._memory.prompt(tokenizer, request, self._recall)
        except TooLongError as error:
            raise too_long(error.least_tokens, max_tokens or 0, "messages", at_least=True) from None
        except ChatError as error:
            raise invalid("messages", f"messages: {error}") from None

    def keep(self, prompt: Prompt, replies: Sequence[SampledReply]) -> None:
        self._memory.keep(prompt, replies)

    def _recall(self, names: Sequence[bytes]) -> Iterator[tuple[bytes, list[StoredTurn]]]:
        found = self._store.read_now(lambda conn: rows.traces_named(conn, names, most=MAX_RECALLED))
        for name, trace_id in found:

            def read(conn: Connection, trace_id: str = trace_id) -> list[FoundAnswer]:
                return rows.answers_of(conn, trace_id)

            yield name, [_remembered(trace_id, answer) for answer in self._store.read_now(read)]


def _remembered(trace_id: str, found: FoundAnswer) -> StoredTurn:
    parent = None
    if found.parent is not None and found.parent_sample is not None:
        parent = SampleLocation(trace_id, found.parent, found.parent_sample)
    return StoredTurn(
        place=SampleLocation(trace_id, found.number, found.sample),
        parent=parent,
        read=found.read,
        sampled=found.tokens,
        name=found.answer.name,
        thoughts=found.answer.thoughts,
        begun=found.begun,
        drift=found.drift,
        by_length=found.stop_reason == StopReason.LENGTH,
    )
