"""Plays rollouts of an evaluation with a command-line agent, each in a sandbox: episodes at a server of ours."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from msgspec import Struct

from palestra.agents.endings import attempt_of
from palestra.config.agents import AgentConfig
from palestra.config.environment_entries import EnvironmentEntry
from palestra.episodes import (
    AsyncEpisode,
    AsyncEpisodeClient,
    AsyncRun,
    EpisodeApiError,
    EpisodeClientError,
    EpisodeResult,
    NewGroup,
    RunSettings,
    play_async,
)
from palestra.net.chat_apis import ModelEndpoint
from palestra.rollouts.agents.setup import RECORDS, agent_player, agent_sampling
from palestra.rollouts.episodes.reader import grade_rollout
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import RolloutSourceError
from palestra.types import StopReason
from palestra.types.episodes import EpisodeKind, GroupState, ResultKey
from palestra.types.rollouts import CODING, PROMPT_TOKENS, SAMPLED_TOKENS, GroupRequest, Rollout, RolloutStop, Turn
from palestra.types.timelines import CallSpan, turn_times

GOODBYE_S = 5.0
CLAIM_S = 1.0  # the end of an evaluation waits for a claim under way
ATTEMPTS = 3  # of an episode that was given back, such as one whose sandbox could not be started


class _Ended(Struct, frozen=True):
    """An episode that has ended; without a result, `why` says the reason."""

    result: EpisodeResult | None
    calls: Sequence[CallSpan] = ()
    seconds: float = 0.0
    why: str = ""


class AgentEvaluationPlayer:
    """Plays coding tasks. One task runs `work`."""

    def __init__(
        self,
        run: AsyncRun,
        client: AsyncEpisodeClient,
        agent: Callable[[AsyncEpisode], Awaitable[EpisodeResult | None]],
    ) -> None:
        self._run, self._client, self._agent = run, client, agent
        self._waiting: dict[str, asyncio.Future[_Ended]] = {}
        """By the ids of their groups, each of which is one episode."""
        self._given_back: Counter[str] = Counter()

    async def play(self, request: GroupRequest, rollout: Rollout) -> Rollout:
        """Fills the record of a rollout. Raises RolloutSourceError if the server does not take its episode."""
        name = hashlib.blake2b(rollout.id.encode(errors="surrogatepass"), digest_size=8).hexdigest()
        ended = self._waiting[name] = asyncio.get_running_loop().create_future()
        group = NewGroup(group_id=name, task=request.task, size=1, kind=EpisodeKind.EVAL, seeds=(rollout.seed,))
        try:
            await self._run.register([group])
        except EpisodeClientError as error:
            raise RolloutSourceError(f"an episode could not be registered: {error}") from None
        _fill(rollout, request, await ended)
        return rollout

    async def work(self, concurrency: int) -> None:
        """Plays whatever is registered, until it is cancelled."""
        watching = asyncio.create_task(self._watch(), name="episodes that end without a player")
        try:
            options = {"run": self._run.name, "concurrency": concurrency, "claim_s": CLAIM_S, "drain_s": 0.0}
            await play_async(self._client, self._play_episode, **options)
            self._give_up("its player has ended")
        except Exception as error:  # boundary: who waits for an episode would wait for ever
            self._give_up(f"episodes cannot be claimed: {error}")
            if not isinstance(error, EpisodeClientError):
                raise
        finally:
            watching.cancel()

    def _give_up(self, why: str) -> None:
        for ended in self._waiting.values():
            if not ended.done():
                ended.set_exception(RolloutSourceError(why))

    async def _watch(self) -> None:
        """Ends the wait for episodes that will not be played any more, such as cancelled ones."""
        with suppress(EpisodeClientError):  # the player hears of a server that is gone
            async for group in self._run.groups(tokens=False):
                ended = self._waiting.get(group.group_id)
                if group.state is GroupState.DROPPED and ended is not None and not ended.done():
                    ended.set_result(_Ended(None, why=f"dropped by the server: {group.reason}"))

    async def close(self) -> None:
        """Cancels what was not played; a server that is gone needs no message."""
        open_groups = [name for name, ended in self._waiting.items() if not ended.done() or ended.cancelled()]
        with suppress(EpisodeClientError, TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                if open_groups:
                    await self._run.cancel(group_ids=open_groups, reason="the evaluation has ended")

    async def _play_episode(self, episode: AsyncEpisode) -> EpisodeResult | None:
        ended, began = self._waiting[episode.group_id], time.monotonic()
        try:
            result = await self._agent(episode)
            calls = [] if result is None else await self._calls(episode)
        except Exception as error:  # boundary: who waits for the episode would wait for ever
            if not ended.done():
                ended.set_exception(RolloutSourceError(f"{episode.task.id} could not be played: {error!r}"))
            raise
        if result is None:
            self._given_back[episode.group_id] += 1
        if not ended.done() and (result is not None or self._given_back[episode.group_id] == ATTEMPTS):
            why = f"given back {ATTEMPTS} times; the log says why" if result is None else ""
            ended.set_result(_Ended(result, calls, time.monotonic() - began, why))
        return result

    async def _calls(self, episode: AsyncEpisode) -> Sequence[CallSpan]:
        attempt = attempt_of(await self._client.timeline(episode.id), episode.attempt)
        return attempt.calls if attempt else []


def _fill(rollout: Rollout, request: GroupRequest, ended: _Ended) -> None:
    rollout.seconds = ended.seconds
    rollout.messages = list(request.task.prompt)
    if ended.result is None:
        rollout.stop, rollout.error = RolloutStop.LOST, ended.why
        return
    own = [call for call in ended.calls if not call.agent]
    if own:
        rollout.messages = [message for call in own for message in (*call.messages, *call.answers)]
    rollout.turns = [
        Turn(
            observation=[],
            tokens=[],
            logprobs=[],
            stop=StopReason.STOP,
            version=0,
            text=str(answer.get("content") or ""),
            sample_s=sample_s,
            env_s=env_s,
        )
        for call, (sample_s, env_s) in zip(own, turn_times(own), strict=True)
        for answer in call.answers
    ]
    rollout.verdict = verdict if isinstance(verdict := ended.result.metadata.get(ResultKey.VERDICT), dict) else {}
    rollout.metrics = dict(ended.result.metrics) | {
        PROMPT_TOKENS: float(sum(call.prompt_tokens for call in ended.calls)),
        SAMPLED_TOKENS: float(sum(call.sampled_tokens for call in ended.calls)),
    }
    grade_rollout(rollout, ended.result)


@asynccontextmanager
async def open_agent_player(
    agent: AgentConfig | None,
    entries: Sequence[EnvironmentEntry],
    endpoint: ModelEndpoint,
    settings: RolloutSettings,
    folder: Path,
    note: Callable[[str], None],
) -> AsyncIterator[dict[str, AgentEvaluationPlayer]]:
    """Opens the player of coding tasks, by the name of their environment. `folder` is the evaluation's. Raises
    RolloutSourceError if the endpoint has no episodes, RolloutSourceError if the agent cannot play here."""
    if agent is None:
        yield {}
        return
    server = endpoint.base_url.removesuffix("/v1")
    name = f"{folder.name}-{secrets.token_hex(4)}"  # what an earlier start has left at the server is not touched
    async with AsyncEpisodeClient(server, endpoint.api_key) as client:
        player = agent_player(agent, entries, client, folder / RECORDS)
        try:
            run = await client.run(name, RunSettings(sampling=agent_sampling(settings)), model=endpoint.model)
        except EpisodeApiError as error:
            raise RolloutSourceError(
                f"an agent plays at a server of Palestra, and {server} has no episodes for it ({error}); leave out "
                "--server, or serve the model with: palestra serve"
            ) from None
        except EpisodeClientError as error:
            raise RolloutSourceError(f"{server} does not answer: {error}") from None
        note(f"{' '.join(agent.command)} plays, {agent.concurrency} at a time; its records are in {folder / RECORDS}")
        evaluated = AgentEvaluationPlayer(run, client, player)
        working = asyncio.create_task(evaluated.work(agent.concurrency), name="agents")
        try:
            yield {CODING: evaluated}
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await evaluated.close()
