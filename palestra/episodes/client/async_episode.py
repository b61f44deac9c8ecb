"""An episode as a player sees it."""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeGuard, Unpack

from palestra.episodes.client.errors import EpisodeClientError, InvalidResult
from palestra.episodes.client.heartbeat import HeldLease
from palestra.episodes.client.leases import GOODBYE_S, ClientLeases
from palestra.episodes.client.results import ResultParts, error_of, result_of
from palestra.types.episodes import EndAnswer, EpisodeKind, EpisodeResult
from palestra.types.rollouts import Task

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)

FORGOTTEN = "left without end()"
MODEL_RETRIES = 8
"""Retries of a model call: about 40 s with the SDK's back-off, for a server that is restarted."""


class OnError(StrEnum):
    """What happens to an episode whose player raises."""

    END = "end"
    """The episode ends as failed, with the error as its result: the cause is the task or the policy."""
    RELEASE = "release"
    """The episode is released for another player: the cause is this machine."""


class EpisodeView:
    """The data of a lease, for coroutines and threads alike."""

    def __init__(self, held_lease: HeldLease):
        self.held_lease = held_lease

    @property
    def id(self) -> str:
        return self.held_lease.lease.episode_id

    @property
    def attempt(self) -> int:
        return self.held_lease.lease.attempt

    @property
    def run(self) -> str:
        return self.held_lease.lease.run

    @property
    def kind(self) -> EpisodeKind:
        return self.held_lease.lease.kind

    @property
    def group_id(self) -> str:
        return self.held_lease.lease.group_id

    @property
    def index(self) -> int:
        return self.held_lease.lease.index

    @property
    def task(self) -> Task:
        return self.held_lease.lease.task

    @property
    def seed(self) -> int:
        return self.held_lease.lease.seed

    @property
    def tags(self) -> dict[str, str]:
        return self.held_lease.lease.tags

    @property
    def version(self) -> int:
        """Version of the weights when it was claimed."""
        return self.held_lease.lease.version

    @property
    def deadline(self) -> float | None:
        return self.held_lease.lease.deadline

    @property
    def base_url(self) -> str:
        """Address for OpenAI's clients, with its `/v1`."""
        return self.held_lease.lease.base_url

    @property
    def anthropic_base_url(self) -> str:
        """Address for Anthropic's clients, which append `/v1/messages` themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def api_key(self) -> str:
        return self.held_lease.lease.api_key

    @property
    def model(self) -> str:
        return self.held_lease.lease.model

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables by which programs with OpenAI's or Anthropic's SDK call this attempt's model."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    @property
    def traceparent(self) -> str:
        """W3C trace context of this attempt; the player's own spans join the trace if they name it as their parent."""
        return self.held_lease.lease.traceparent

    @property
    def can_continue(self) -> bool:
        """Whether the episode can continue, by the last heartbeat. Once it is false, no result is accepted."""
        return self.held_lease.can_continue and not self.held_lease.is_over

    @property
    def reason(self) -> str:
        """The reason why the episode cannot continue."""
        return self.held_lease.reason

    @property
    def is_over(self) -> bool:
        """Whether this player has ended the episode or given it back."""
        return self.held_lease.is_over

    @property
    def result(self) -> EpisodeResult | None:
        """The result that was sent last."""
        return self.held_lease.result

    @property
    def ended(self) -> EndAnswer | None:
        """The server's answer to the result."""
        return self.held_lease.ended

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} attempt {self.attempt} of run {self.run}>"


class AsyncEpisode(EpisodeView):
    """An episode that this client plays: its task, its model, its end; for coroutines."""

    def __init__(self, held_lease: HeldLease, leases: ClientLeases):
        super().__init__(held_lease)
        self._leases = leases

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """An OpenAI client whose calls belong to this attempt; options are those of the SDK."""
        from openai import AsyncOpenAI

        options.setdefault("max_retries", MODEL_RETRIES)
        return AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, **options)

    async def end(self, reward: SupportsFloat | None = None, **parts: Unpack[ResultParts]) -> EndAnswer:
        """Ends the episode; returns when the server has stored the result. `is_kept` of the answer is false if it came
        too late. Raises InvalidResult for an impossible result."""
        return await self.end_with(result_of(reward, **parts))

    async def end_with(self, result: EpisodeResult) -> EndAnswer:
        return await self._leases.end(self.held_lease, result)

    async def release(self, reason: str = "released") -> None:
        """Gives the episode back, so that another player gets it."""
        await self._leases.release([self.held_lease], reason)

    async def check(self) -> bool:
        """Asks the server now, instead of waiting for the next heartbeat."""
        await self._leases.check(self.held_lease)
        return self.can_continue

    async def leave(self, error: BaseException | None = None, on_error: OnError = OnError.END) -> None:
        """Ends or releases the episode after the player. Errors here are only logged, so that the player's error is the
        one raised."""
        try:
            if not self.can_continue:
                return
            if ends_as_failed(error, on_error):
                await self.end_with(EpisodeResult(error=error_of(error)))
            else:
                retry_s = None if error is None else GOODBYE_S
                await self._leases.release([self.held_lease], leave_reason(error), retry_s=retry_s)
        except EpisodeClientError as problem:
            log.warning("episode %s: %s", self.id, problem)
        finally:
            self._leases.forget(self.held_lease)


def ends_as_failed(error: BaseException | None, on_error: OnError) -> TypeGuard[Exception]:
    """Whether an error is the episode's result. Errors that stop the program, and errors between client and server, are
    not."""
    is_ours = isinstance(error, EpisodeClientError) and not isinstance(error, InvalidResult)
    return isinstance(error, Exception) and not is_ours and on_error is OnError.END


def leave_reason(error: BaseException | None) -> str:
    if error is None:
        return FORGOTTEN
    reason = error_of(error)
    return f"{reason.type}: {reason.message[:200]}" if reason.message else reason.type
