"""Turns of a policy that is behind a model endpoint: chat calls, no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.net.chat_apis import CallAnswer
from palestra.rollouts.endpoint.model_calls import CallRefused, ModelCalls
from palestra.rollouts.rollout_loop import PolicyTurn, RolloutEnded, RolloutSettings
from palestra.rollouts.seeds import turn_seed
from palestra.rollouts.stopwatch import RolloutStopwatch
from palestra.types.rollouts import Message, RolloutStop


class ChatTurnSampler:
    """Samples turns by chat calls to a model endpoint."""

    def __init__(self, calls: ModelCalls, settings: RolloutSettings, seed: int) -> None:
        self._calls, self._settings, self._seed = calls, settings, seed
        self.messages: list[Message] = []
        self.answers: list[CallAnswer] = []
        self._used = 0
        """Number of tokens of the conversation so far."""

    async def begin(self, messages: Sequence[Message]) -> None:
        self.messages = list(messages)

    async def sample_turn(self, turn: int, watch: RolloutStopwatch) -> PolicyTurn:
        """Samples a turn. Raises the caller's own error if it may make no calls any more."""
        settings = self._settings
        room = max(1, settings.max_context - self._used)
        try:
            answer = await self._calls.chat(
                self.messages,
                watch.left_s,
                max_tokens=min(settings.max_tokens, room),
                seed=turn_seed(self._seed, turn),
                temperature=settings.temperature,
                top_p=settings.top_p,
                **({} if settings.top_k < 0 else {"top_k": settings.top_k}),  # not all endpoints know it
            )
        except CallRefused as error:
            raise RolloutEnded(
                RolloutStop.CONTEXT if error.is_used_up else RolloutStop.SAMPLING_FAILED, error
            ) from None
        except TimeoutError:
            raise RolloutEnded(RolloutStop.TIMEOUT, watch.over()) from None
        watch.spent_s += answer.seconds
        self.answers.append(answer)
        self.messages.append(answer.message)
        self._used = answer.tokens
        return PolicyTurn(answer.text, answer.stop)

    def observe(self, messages: Sequence[Message]) -> None:
        self.messages += messages

    def grade_spans(self, spans: object) -> None:
        """Tokens are not known here, so rewards for parts of a turn are left out."""

    def go_on(self, observations: Sequence[Message], history: list[Message] | None) -> None:
        if history is not None:
            self.messages = list(history)
        limit = self._settings.max_context
        if self._used >= limit:
            error = f"{self._used} tokens: no room for a turn in {limit} (rollout.max_context)"
            raise RolloutEnded(RolloutStop.CONTEXT, error)
