"""A conversation of a person, a model and the tools of an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from palestra.chat.tool_calls import parse_tool_call
from palestra.endpoints.chat_environment import ChatEnvironment
from palestra.endpoints.streaming import stream_answer
from palestra.net.chat_apis import AnswerPiece, ModelEndpoint, StreamedAnswer
from palestra.types import StopReason
from palestra.types.rollouts import Message

MAX_TURNS = 20
"""Answers of the model to one thing that a person said: some call tools for ever."""


class ToolMessages(Struct, frozen=True):
    """What the environment said to the model."""

    messages: list[Message]


class EpisodeEnd(Struct, frozen=True):
    """The environment has ended its episode."""

    reward: float | None


ChatEvent = AnswerPiece | ToolMessages | StreamedAnswer | EpisodeEnd
"""What happens in a conversation, in order; a StreamedAnswer is the end of an answer."""
Show = Callable[[ChatEvent], None]


class Conversation:
    """One model's conversation. `messages` is exactly what was said, and what its next call reads."""

    def __init__(
        self,
        endpoint: ModelEndpoint,
        options: dict[str, object],
        system: str | None = None,
        environment: ChatEnvironment | None = None,
    ) -> None:
        """`options` go into every call. `system` replaces what the environment says."""
        self._endpoint, self._options, self._environment = endpoint, options, environment
        own = environment.system if environment else []
        self._system: list[Message] = [{"role": "system", "content": system}] if system is not None else own
        self.messages: list[Message] = [*self._system]
        self._starts: list[int] = []
        """Place in the messages of each thing that the person said."""

    @property
    def question(self) -> list[Message]:
        """The question of the environment's task."""
        return self._environment.question if self._environment else []

    async def say(self, text: str, show: Show) -> None:
        """Says something to the model; its calls of tools are answered until it has said something else."""
        await self._exchange([{"role": "user", "content": text}], show, is_episode=False)

    async def play(self, show: Show) -> None:
        """Asks the environment's own question. Every answer goes to the environment until its episode ends."""
        assert self._environment is not None
        await self._environment.reset(is_free=False)
        show(ToolMessages(self.question))
        await self._exchange(self.question, show, is_episode=True)

    def undo(self) -> bool:
        """Takes back what was said last and everything after it. What tools have done stays done."""
        if not self._starts:
            return False
        del self.messages[self._starts.pop() :]
        return True

    async def reset(self) -> None:
        self.messages, self._starts = [*self._system], []
        if self._environment:
            await self._environment.reset()

    async def _exchange(self, added: Sequence[Message], show: Show, *, is_episode: bool) -> None:
        self._starts.append(len(self.messages))
        self.messages += added
        try:
            await self._turns(show, is_episode)
        finally:
            if self.messages[-1]["role"] != "assistant" and len(self.messages) == self._starts[-1] + len(added):
                self.undo()  # there was no answer

    async def _turns(self, show: Show, is_episode: bool) -> None:
        turns = self._environment.max_turns if self._environment else 1
        for _ in range(min(turns, MAX_TURNS)):
            answer = await self._answer(show)
            is_for_tools = is_episode or parse_tool_call(answer.text) is not None
            if self._environment is None or answer.stop is StopReason.LENGTH or not is_for_tools:
                return
            result = await self._environment.step(answer.text)
            self.messages += result.observations
            show(ToolMessages(result.observations))
            if result.done:
                show(EpisodeEnd(result.reward))
            if result.done or not result.observations:
                return

    async def _answer(self, show: Show) -> StreamedAnswer:
        answer = StreamedAnswer()
        try:
            async for piece in stream_answer(self._endpoint, self.messages, **self._options):
                answer.add(piece)
                show(piece)
        finally:
            if answer.text or answer.reasoning or answer.stop:
                self.messages.append(answer.message)
            show(answer)
        return answer
