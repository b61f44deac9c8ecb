"""The trainer's side of a run's episodes: the run at the server, its weights, its log, its own players."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from msgspec.structs import replace

from palestra.config.api_key import api_key
from palestra.config.train import GrpoConfig
from palestra.environments.environment_set import EnvironmentSet
from palestra.episodes import AsyncEpisodeClient, AsyncRun, EpisodeClientError, RunSettings, play_async
from palestra.episodes.client import api
from palestra.episodes.client.players import AsyncPlayer
from palestra.rollouts.agents.setup import RECORDS, agent_player, agent_sampling, trained_branches
from palestra.rollouts.episodes.log import EpisodeLog, refused_to_us
from palestra.rollouts.episodes.names import GroupIdentity, GroupNames
from palestra.rollouts.episodes.player import EnvironmentPlayer, EpisodePlayer, sampling_tags
from palestra.rollouts.episodes.reader import EpisodeReader
from palestra.rollouts.episodes.source import EpisodeContext, EpisodeSource, cancel_groups
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.sources import PlayedRun, RolloutSourceError
from palestra.rollouts.verifiers.player import open_verifiers_players
from palestra.types.episodes import EpisodeInfo, EpisodeKind, EpisodeState, LeaseRef, WeightPolicy

PAGE = 1000
GOODBYE_S = 5.0
CLAIM_S = 1.0  # the end of a run waits for a claim under way


class EpisodeRun:
    """A run's episodes; `open` makes it."""

    def __init__(
        self,
        config: GrpoConfig,
        session: PlayedRun,
        environments: EnvironmentSet,
        identity: GroupIdentity,
        run: AsyncRun,
    ) -> None:
        self._session, self._run, self._identity = session, run, identity
        self._names = GroupNames(identity.nonce, session.run.attempt)
        self._published = -1
        # one publication at a time, otherwise an older version could come after a newer one
        self._publishing = asyncio.Lock()
        self.log = EpisodeLog(run, self._names, session.state, self._first_cursor())
        reader = EpisodeReader(session.tokenizer, identity.step_of, trained_branches(config))
        context = EpisodeContext(run, self.log, reader, self, environments.packed, config.episodes, set())
        settings = RolloutSettings.of(config.rollout)
        eval_settings = RolloutSettings.of(config.rollout, config.eval.temperature)
        self.source = EpisodeSource(context, EpisodeKind.TRAIN, self._names.train, sampling_tags(settings))
        self.eval_source = EpisodeSource(context, EpisodeKind.EVAL, self._names.eval, sampling_tags(eval_settings))

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: GrpoConfig, session: PlayedRun, environments: EnvironmentSet
    ) -> AsyncIterator[EpisodeRun]:
        name, identity = config.episodes.run or session.run.name, GroupIdentity.load(session.run.path)
        me = f"trainer-{identity.nonce}"
        async with AsyncEpisodeClient(session.url, api_key(), client_id=me, retry_s=math.inf) as client:
            with refused_to_us(f"{session.url} does not support episodes"):
                run = await client.run(name)
                run = await client.run(name, run_settings(config, run.info.settings))
            opened = cls(config, session, environments, identity, run)
            await opened._clear_up(client)
            opened._begin()
            session.listener.note(where_to_play(config, session.url, name))
            logs = session.run.path / "logs"
            async with (
                open_verifiers_players(config.environments, logs, config.players) as others,
                opened._working(client, config, environments, others),
                opened._ending(),
            ):
                yield opened

    async def publish(self, sampler: PolicySampler) -> None:
        """Publishes weights, once for each version."""
        # both now: a sampler that follows a run may have newer weights when it is our turn
        version, model = self._identity.version_of(sampler.version), sampler.model
        async with self._publishing:
            if version <= self._published:
                return
            with refused_to_us("the new weights could not be published to the players"):
                await self._run.publish(version, model)
                if self._published < 0 and self._run.info.is_paused:
                    await self._run.resume()
            self._published = version

    @asynccontextmanager
    async def _ending(self) -> AsyncIterator[None]:
        """Ends the run at the server. If the run is complete, the remaining episodes are cancelled. If it may be
        resumed, it is paused: nothing is claimed, and what is being played is held."""
        try:
            yield
        except BaseException:
            with suppress(EpisodeClientError, TimeoutError):  # a server that is gone needs no message
                async with asyncio.timeout(GOODBYE_S):
                    await self._run.pause()
            raise
        await cancel_groups(self._run, sorted({one.group_id for one in await self._open_episodes()}))
        await self.log.commit(self.log.settled(self._session.state))

    def _first_cursor(self) -> int:
        info, saved = self._run.info, self._session.state.cursor
        if saved > info.delivered:
            self._session.listener.note(
                f"the checkpoint has {saved} played groups of run {info.run!r}, but the server has "
                f"{info.delivered}: it is not the same server, so groups that are not in the checkpoint are "
                "played again"
            )
            return info.committed
        return max(saved, info.committed)

    def _begin(self) -> None:
        info = self._run.info
        first = info.version if info.model is None else info.version + 1
        self._identity.begin(self._session.run.path, first, self._session.state.step)

    async def _clear_up(self, client: AsyncEpisodeClient) -> None:
        """Cleans up after a kill: cancels groups that will never be requested, and releases what this run's own players
        had leased, instead of waiting until the leases expire. Leases of other trainers are not touched."""
        leftover, leased = set[str](), list[LeaseRef]()
        for one in await self._open_episodes():
            if not self._names.read(one.group_id).is_ours:
                raise RolloutSourceError(
                    f"run {self._run.name!r} at {self._session.url} has open groups of another trainer "
                    f"({one.group_id}); use another name (episodes.run=NAME), or cancel them: palestra episode "
                    f"cancel --run {self._run.name} --all"
                )
            if self._names.is_settled(one.group_id, self._session.state):
                leftover.add(one.group_id)
            if one.state is EpisodeState.LEASED and one.client_id.endswith(client.client_id):
                leased.append(LeaseRef(episode_id=one.episode_id, attempt=one.attempt))
        await cancel_groups(self._run, sorted(leftover))
        with refused_to_us("episodes could not be given back"):
            for batch in api.batches(leased):
                await client.do(api.release(client.client_id, batch, "the trainer was restarted"))

    async def _open_episodes(self) -> list[EpisodeInfo]:
        found: list[EpisodeInfo] = []
        with refused_to_us("the run's episodes cannot be listed"):
            for state in (EpisodeState.QUEUED, EpisodeState.LEASED):
                offset = 0
                while page := (await self._run.episodes(state, limit=PAGE, offset=offset)).episodes:
                    found += page
                    offset += len(page)
        return found

    @asynccontextmanager
    async def _working(
        self,
        client: AsyncEpisodeClient,
        config: GrpoConfig,
        environments: EnvironmentSet,
        others: Mapping[str, EpisodePlayer],
    ) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.log.follow(), name="episode log")]
        if config.players:
            player = self._player(client, config, environments, others)
            tasks.append(asyncio.create_task(self._play(client, player, config.players), name="players"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _player(
        self,
        client: AsyncEpisodeClient,
        config: GrpoConfig,
        environments: EnvironmentSet,
        others: Mapping[str, EpisodePlayer],
    ) -> AsyncPlayer:
        if config.rollouts == "agent":
            return agent_player(config.agent, config.environments, client, self._session.run.path / RECORDS)
        return EnvironmentPlayer(environments, RolloutSettings.of(config.rollout), others)

    async def _play(self, client: AsyncEpisodeClient, player: AsyncPlayer, count: int) -> None:
        try:
            with refused_to_us("this run's own players cannot claim"):
                await play_async(client, player, run=self._run.name, concurrency=count, claim_s=CLAIM_S, drain_s=0.0)
        except Exception as error:
            self.log.fail(error)


def run_settings(config: GrpoConfig, known: RunSettings) -> RunSettings:
    """Returns the run's settings; those that the config does not mention stay as they are."""
    is_dropped = config.asynchronous.enabled and config.asynchronous.in_flight == "drop"
    return replace(
        known,
        weight_policy=WeightPolicy.LAG if is_dropped else WeightPolicy.FINISH,
        max_lag=config.asynchronous.max_staleness,
        lease_s=config.episodes.lease_s,
        max_attempts=config.episodes.max_attempts,
        sampling=agent_sampling(RolloutSettings.of(config.rollout)) if config.rollouts == "agent" else known.sampling,
    )


def where_to_play(config: GrpoConfig, url: str, name: str) -> str:
    here = f"{config.players} players here" if config.players else "no players here"
    command = f"agent play {config.agent.command[0]} --tasks FOLDER" if config.rollouts == "agent" else "episode play"
    if config.server is None:
        return f"episodes of run {name!r}: {here}; for players elsewhere: palestra serve, and train with --server URL"
    return f"episodes of run {name!r}: {here}; elsewhere: palestra {command} --server {url} --run {name}"
