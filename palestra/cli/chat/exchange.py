"""One exchange with one or two models at once: what a person says, and what comes back until they are to speak
again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

    from palestra.endpoints.conversation import ChatEvent, Conversation

Show = Callable[[int, "ChatEvent | None"], None]
"""Called with the number of a model and what it does; None: it has come to its end."""


def exchange(portal: BlockingPortal, conversations: Sequence[Conversation], text: str | None, show: Show) -> None:
    """Says `text` to all; None: the question of their environment. Raises KeyboardInterrupt when Ctrl-C has stopped the
    answers, and the error of the first model that has one."""
    events: SimpleQueue[tuple[int, ChatEvent | None]] = SimpleQueue()

    async def talk(index: int, conversation: Conversation) -> None:
        def put(event: ChatEvent) -> None:
            events.put((index, event))

        try:
            await (conversation.play(put) if text is None else conversation.say(text, put))
        finally:
            events.put((index, None))

    talks = [portal.start_task_soon(talk, *numbered) for numbered in enumerate(conversations)]
    try:
        _follow(events, len(talks), show)
    except KeyboardInterrupt:
        _cancel(talks)
        while not events.empty():
            show(*events.get())
        raise
    for one in talks:
        one.result()


def _follow(events: SimpleQueue[tuple[int, ChatEvent | None]], talks: int, show: Show) -> None:
    while talks:
        index, event = events.get()
        talks -= event is None
        show(index, event)


def _cancel(talks: Sequence[Future[None]]) -> None:
    for one in talks:
        one.cancel()
    wait(talks)
