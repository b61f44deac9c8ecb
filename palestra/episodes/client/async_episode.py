"""An episode in the hands of a coroutine.

Owns: end, release and check with `await`. Never touches: claiming.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat

from palestra.episodes.client import api
from palestra.episodes.client.episode import (
    GOODBYE_S,
    MODEL_RETRIES,
    EpisodeView,
    OnError,
    ends_as_failed,
    leave_reason,
)
from palestra.episodes.client.errors import EpisodeClientError
from palestra.episodes.client.heartbeat import Held
from palestra.episodes.client.results import check_result, error_of, result_of
from palestra.types.episodes import Ended, EpisodeError, EpisodeResult

if TYPE_CHECKING:
    import openai

    from palestra.episodes.client.async_client import AsyncEpisodeClient

log = logging.getLogger(__name__)


class AsyncEpisode(EpisodeView):
    def __init__(self, held: Held, client: AsyncEpisodeClient):
        super().__init__(held)
        self._client = client

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """A client whose calls are this attempt's; options are the SDK's."""
        from openai import AsyncOpenAI

        options.setdefault("max_retries", MODEL_RETRIES)
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    async def end(
        self,
        reward: SupportsFloat | None = None,
        *,
        step_rewards: Iterable[SupportsFloat] = (),
        agent_rewards: Mapping[str, SupportsFloat] | None = None,
        is_success: bool | None = None,
        metrics: Mapping[str, SupportsFloat] | None = None,
        metadata: Mapping[str, Any] | None = None,
        error: EpisodeError | BaseException | None = None,
    ) -> Ended:
        """As Episode.end."""
        return await self.end_with(
            result_of(
                reward,
                step_rewards=step_rewards,
                agent_rewards=agent_rewards,
                is_success=is_success,
                metrics=metrics,
                metadata=metadata,
                error=error,
            )
        )

    async def end_with(self, result: EpisodeResult) -> Ended:
        call = api.end(self._client.client_id, [self.end_request(check_result(result))])
        ended = (await self._client.do(call)).ended[0]
        return self._client.sync.settle(self, ended)

    async def release(self, reason: str = "released", *, retry_s: float | None = None) -> None:
        if self.is_over:
            return
        self.held.reason = reason
        self._client.sync.forget(self)
        await self._client.do(api.release(self._client.client_id, [self.held.ref], reason), retry_s=retry_s)

    async def check(self) -> bool:
        asked_at = time.monotonic()
        told = await self._client.do(api.heartbeat(self._client.client_id, [self.held.ref]))
        self._client.sync.heartbeat.take_in(told.beats, asked_at)
        return self.can_continue

    async def leave(self, error: BaseException | None = None, on_error: OnError = OnError.END) -> None:
        """As Episode.leave."""
        try:
            if not self.can_continue:
                return
            if ends_as_failed(error, on_error):
                await self.end_with(EpisodeResult(error=error_of(error)))
            else:
                await self.release(leave_reason(error), retry_s=None if error is None else GOODBYE_S)
        except EpisodeClientError as problem:
            log.warning("episode %s: %s", self.id, problem)
        finally:
            self._client.sync.forget(self)
