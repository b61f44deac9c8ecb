"""Groups that are registered at a real server, played without a model, and read by their cursor."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from palestra.config.train import EpisodeRollouts
from palestra.episodes import AsyncEpisodeClient, AsyncRun, NewGroup
from palestra.rollouts.episodes.log import EpisodeLog
from palestra.rollouts.episodes.names import GroupIdentity, GroupNames
from palestra.rollouts.episodes.reader import EpisodeReader
from palestra.rollouts.episodes.source import EpisodeContext, EpisodeSource
from palestra.rollouts.policy_sampler import PolicySampler
from palestra.rollouts.sources import RolloutSourceError
from palestra.runs.run_state import RunState, StateError
from palestra.types.episodes import EpisodeKind
from palestra.types.rollouts import Group, GroupRequest, RolloutStop, Task
from tests.training.scripted import ScriptedSampler, chat_tokenizer

_numbers = itertools.count()
GENERATIONS = {2: ["ab12/g000000.2", "ab12/g000001"], 3: ["ab12/g000000.3", "ab12/g000001.2"]}
"""By the number of the start."""


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    """Each test waits for the last one."""
    monkeypatch.setattr("palestra.rollouts.episodes.log.POLL_S", 0.05)


def request(position: int, count: int = 2, **extras: Any) -> GroupRequest:
    task = Task(id=f"t{position}", environment="x", prompt=[{"role": "user", "content": "?"}], extras=extras)
    return GroupRequest(id=f"g{position:06d}", task=task, step=0, seeds=tuple(range(count)), position=position)


@dataclass
class Trainer:
    """As one start of a training run, without its weights."""

    client: AsyncEpisodeClient
    run: AsyncRun
    state: RunState
    names: GroupNames
    log: EpisodeLog
    config: EpisodeRollouts = field(default_factory=EpisodeRollouts)
    published: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        reader = EpisodeReader(chat_tokenizer(), lambda version: version)
        self.desk = EpisodeContext(self.run, self.log, reader, self, lambda task: task, self.config, set())
        self.source = EpisodeSource(self.desk, EpisodeKind.TRAIN, self.names.train, {"max_tokens": "8"})
        self.evals = EpisodeSource(self.desk, EpisodeKind.EVAL, self.names.eval, {})

    async def publish(self, sampler: PolicySampler) -> None:
        self.published.append(sampler.version)

    async def collect(self, *requests: GroupRequest, kind: str = "train") -> list[Group]:
        source = self.source if kind == "train" else self.evals
        return [group async for group in source.play(requests, ScriptedSampler("", 3))]

    def begin(self, *requests: GroupRequest) -> asyncio.Task[list[Group]]:
        return asyncio.create_task(self.collect(*requests))

    async def play(self, count: int, reward: float = 1.0) -> list[str]:
        """Ids of the groups that were claimed."""
        claimed: list[str] = []
        while len(claimed) < count:
            episodes = await self.client.claim(count - len(claimed), run=self.run.name, wait_s=10)
            await self.client.end_many([(episode, reward) for episode in episodes])
            claimed += [episode.group_id for episode in episodes]
        return claimed

    async def queued(self, count: int) -> None:
        while (await self.run.refresh()).queued < count:
            pass

    async def delivered(self, number: int) -> None:
        """And read."""
        async for group in self.run.groups(0, tokens=False):
            if group.number >= number:
                break
        while self.log.cursor + len(self.log._read) < number:
            await self.run.refresh()


@asynccontextmanager
async def a_trainer(
    url: str, name: str, state: RunState | None = None, *, nonce: str = "ab12", attempt: int = 1, **config: Any
) -> AsyncIterator[Trainer]:
    async with AsyncEpisodeClient(url, "tml-me") as client:
        run, state = await client.run(name, model="ephebe"), state or RunState()
        names = GroupNames(nonce, attempt)
        log = EpisodeLog(run, names, state, max(state.cursor, run.info.committed))
        following = asyncio.create_task(log.follow())
        try:
            yield Trainer(client, run, state, names, log, EpisodeRollouts(**config))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@pytest.fixture
def name() -> str:
    return f"source-{next(_numbers)}"


def test_groups_come_whole_to_whoever_waits_for_them(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name) as trainer:
            requested = [trainer.begin(request(position)) for position in range(3)]
            await trainer.play(6, reward=0.5)
            groups = [group for (group,) in await asyncio.gather(*requested)]
            assert [group.id for group in groups] == ["g000000", "g000001", "g000002"]
            assert [one.reward for group in groups for one in group.rollouts] == [0.5] * 6
            assert [one.id for one in groups[1].rollouts] == ["g000001-0", "g000001-1"]
            assert trainer.published == [3, 3, 3]

    asyncio.run(play())


def test_the_cursor_stays_behind_groups_that_are_not_used(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name) as trainer:
            await trainer.run.register([NewGroup(group_id="somebody-elses", task=request(0).task, size=1)])
            requested = trainer.begin(*map(request, range(4)))
            await trainer.play(9)
            await requested
            trainer.state.position, trainer.state.pending = 4, [2]
            await trainer.delivered(5)
            assert trainer.log.settled(trainer.state) == 3  # another's, 0 and 1
            trainer.state.pending = []
            assert trainer.log.settled(trainer.state) == 5
            await trainer.log.commit(5)
            assert trainer.run.info.committed == 5

    asyncio.run(play())


def test_after_a_kill_what_was_delivered_is_used_and_not_played_again(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name) as trainer:
            requested = trainer.begin(*map(request, range(3)))
            await trainer.play(6, reward=0.25)
            await requested
        state = RunState(step=1, position=1, cursor=0)  # a checkpoint that holds position 0
        async with a_trainer(ephebe_url, name, state, attempt=2) as again:
            groups = await again.collect(request(1), request(2))
            assert [group.rollouts[0].reward for group in groups] == [0.25, 0.25]
            assert (await again.run.refresh()).queued == 0
            state.position = 3
            assert again.log.settled(state) == 3

    asyncio.run(play())


def test_an_older_checkpoint_asks_anew_for_what_is_committed(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name) as trainer:
            requested = trainer.begin(request(0))
            await trainer.play(2)
            await requested
            await trainer.log.commit(1)
        for attempt in GENERATIONS:
            async with a_trainer(ephebe_url, name, attempt=attempt) as again:
                requested = again.begin(request(0), request(1))
                assert sorted(set(await again.play(4, reward=0.5))) == GENERATIONS[attempt]
                assert [one.reward for group in await requested for one in group.rollouts] == [0.5] * 4
                await again.log.commit(again.run.info.committed + 2)

    asyncio.run(play())


def test_settings_that_were_changed_ask_anew_and_the_old_group_is_cancelled(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name) as trainer:
            requested = trainer.begin(request(0))
            await trainer.queued(2)
            requested.cancel()
        async with a_trainer(ephebe_url, name, attempt=2) as again:
            requested = again.begin(request(0, level=2), request(1))
            await again.delivered(1)  # the old one, dropped
            assert sorted(await again.play(4)) == ["ab12/g000000.2"] * 2 + ["ab12/g000001"] * 2
            assert sorted(group.id for group in await requested) == ["g000000", "g000001"]

    asyncio.run(play())


def test_a_group_that_is_given_up_is_cancelled_with_the_next_registration(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name) as trainer:
            given_up = trainer.begin(request(0))
            await trainer.queued(2)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            assert (await trainer.run.refresh()).queued == 2  # a run that ends here may be resumed
            requested = trainer.begin(request(1))
            await trainer.delivered(1)  # dropped
            assert await trainer.play(2) == ["ab12/g000001"] * 2
            await requested
            again = trainer.begin(request(0))  # as after a resume from before it was given up
            assert await trainer.play(2) == ["ab12/g000000.2"] * 2
            assert [group.id for group in await again] == ["g000000"]

    asyncio.run(play())


def test_a_dropped_group_is_a_group_with_a_reason(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name, on_loss="drop") as trainer:
            requested = trainer.begin(request(0))
            (episode,) = await trainer.client.claim(1, run=name, wait_s=10)
            await trainer.run.cancel(episode_ids=[episode.id], reason="broken")
            ((group,),) = await asyncio.gather(requested)
            assert [one.stop for one in group.rollouts] == [RolloutStop.LOST] * 2
            assert "1 of 2 episodes are left" in (group.rollouts[0].error or "")
            assert trainer.log.take_metrics()["episodes/dropped_groups"] == 1

    asyncio.run(play())


def test_evaluations_belong_to_the_start_that_asked_for_them(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name) as trainer:
            requested = asyncio.create_task(trainer.collect(request(0), kind="eval"))
            claimed = await trainer.play(2)
            await requested
            assert trainer.log.settled(trainer.state) == 0
            trainer.state.evaluated = 0
            assert trainer.log.settled(trainer.state) == 1
        async with a_trainer(ephebe_url, name, attempt=2) as again:
            requested = asyncio.create_task(again.collect(request(0), kind="eval"))
            assert not set(await again.play(2)) & set(claimed)
            await requested
            assert again.log.settled(again.state) == 1  # the first one's, which nobody will ask for

    asyncio.run(play())


def test_oversampled_groups_are_whole_with_the_first(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name, oversample=2) as trainer:
            requested = trainer.begin(request(0))
            await trainer.play(2)
            ((group,),) = await asyncio.gather(requested)
            assert len(group.rollouts) == 2
            assert (await trainer.run.refresh()).queued == 0

    asyncio.run(play())


def test_a_reader_that_is_refused_ends_those_who_wait(ephebe_url, name):
    from palestra.rollouts.policy_sampler import PolicyError

    async def play() -> None:
        async with a_trainer(ephebe_url, name) as trainer:
            trainer.log.cursor = 99  # of another database
            with pytest.raises(PolicyError, match="cannot be read"):
                await trainer.collect(request(0))
            with pytest.raises(PolicyError, match="cannot be read"):
                await trainer.collect(request(1))

    asyncio.run(play())


def test_a_task_that_is_no_json_is_named(ephebe_url, name):
    async def play() -> None:
        async with a_trainer(ephebe_url, name) as trainer:
            with pytest.raises(RolloutSourceError, match="t7"):
                await trainer.collect(request(7, thing=object()))

    asyncio.run(play())


def test_versions_are_steps_of_the_lineage_they_were_published_in(tmp_path):
    first = GroupIdentity.load(tmp_path)
    first.begin(tmp_path, 0, 0)
    assert [first.version_of(step) for step in (0, 4)] == [0, 4]
    again = GroupIdentity.load(tmp_path)
    assert again.nonce == first.nonce
    again.begin(tmp_path, 5, 2)  # killed at step 4, resumed after 2
    again.begin(tmp_path, 5, 2)  # and once more, before it had published anything
    assert len(again.lineages) == 2
    assert [again.version_of(step) for step in (2, 3)] == [5, 6]
    assert [again.step_of(version) for version in (0, 3, 4, 5, 7)] == [0, 3, 4, 2, 4]
    (tmp_path / "episodes.json").write_text("{")
    with pytest.raises(StateError, match=r"episodes\.json cannot be read"):
        GroupIdentity.load(tmp_path)
