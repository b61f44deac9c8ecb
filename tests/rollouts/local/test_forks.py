"""Forks: from a copy of the world the rollout goes on in other ways, the same ones each time."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from palestra.config.branching import BranchConfig
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import BaseTextEnv, EnvironmentSet
from palestra.rollouts.local.player import LocalRollouts, PlayerContext
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.types.rollouts import Group, GroupRequest, Rollout, RolloutStop, Task
from palestra.types.sampling import sample_seed
from tests.training.scripted import Asked, ScriptedSampler, chat_tokenizer

TURNS = 4
ALIVE: set[object] = set()


class Diary(BaseTextEnv):
    """Remembers all that was said; the reward is the number of different things, at the end."""

    max_turns = TURNS

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__(env_config, extras)
        self.said: list[str] = []

    def step(self, action: str) -> Any:
        self.turns += 1
        self.said.append(action)
        done = self.turns >= TURNS
        seen = [{"role": "user", "content": " ".join(self.said)}]
        return {"observations": seen, "reward": float(len(set(self.said)) if done else 0.25), "done": done}

    def get_metrics(self) -> dict[str, Any]:
        return {"turns": self.turns}


class Elsewhere(Diary):
    """Its world is not in the object."""

    def close(self) -> None:
        ALIVE.discard(self)


class Written(Elsewhere):
    """Has to be closed, and copies itself."""

    def init(self, prompt: Any) -> Any:
        ALIVE.add(self)
        return prompt, {}

    def snapshot(self) -> bytes:
        return " ".join(self.said).encode()

    def restore(self, data: bytes) -> None:
        ALIVE.add(self)
        self.said = data.decode().split()
        self.turns = len(self.said)


class Moody(Elsewhere):
    """No two of them answer the same."""

    number = itertools.count()

    def step(self, action: str) -> Any:
        answer = super().step(action)
        return {**answer, "observations": [{"role": "user", "content": str(next(self.number))}]}


class Stubborn(Diary):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot be copied")


def by_seed(asked: Asked) -> str:
    return f"w{(asked.params.seed or 0) % 5}"


def play(env: type[BaseTextEnv] = Diary, count: int = 2, **branch: Any) -> tuple[Group, ScriptedSampler]:
    sampler = ScriptedSampler(by_seed)
    settings = RolloutSettings(
        max_tokens=8, max_context=2000, timeout_s=30, branch=BranchConfig.model_validate(branch), concurrency=3
    )
    name = f"{__name__}:{env.__name__}"
    task = Task(id="t", environment=name, prompt=[{"role": "user", "content": "Go."}])
    request = GroupRequest(id="g", task=task, step=0, seeds=tuple(sample_seed(7, i) for i in range(count)))

    async def go() -> Group:
        with EnvironmentSet([EnvironmentEntry(name=name)], env_threads=2, env_timeout_s=10) as environments:
            source = LocalRollouts(PlayerContext(chat_tokenizer(), environments, settings))
            (group,) = [one async for one in source.play([request], sampler)]
            await source.close()
            return group

    group = asyncio.run(go())
    assert not ALIVE
    return group, sampler


def tokens_before(rollout: Rollout, turn: int) -> list[int]:
    before = [t for one in rollout.turns[:turn] for t in [*one.observation, *one.tokens]]
    return rollout.prompt + before + rollout.turns[turn].observation


@pytest.mark.parametrize(
    ("env", "replay"), [(Diary, False), (Written, False), (Written, True), (Elsewhere, True), (Stubborn, True)]
)
def test_forks_go_on_from_the_state_before_a_turn(env: type[BaseTextEnv], replay: bool):
    group, _ = play(env, at="each_turn", width=2, replay=replay)
    for rollout in group.rollouts:
        assert [fork.fork_turn for fork in rollout.forks] == [1, 1, 2, 2, 3, 3]
        for fork in rollout.forks:
            assert fork.prompt == tokens_before(rollout, fork.fork_turn)
            assert len(fork.turns) == TURNS - fork.fork_turn
            assert fork.metrics == {"turns": TURNS}
            assert fork.stop is RolloutStop.DONE
            said = [m["content"] for m in fork.messages if m["role"] == "assistant"]
            own = [turn.text for turn in rollout.turns[: fork.fork_turn]]
            assert said == own + [turn.text for turn in fork.turns]
            assert fork.reward == 0.25 * (TURNS - 1) + len(set(said))
        assert not rollout.not_forked


def test_the_forked_rollout_itself_is_not_changed():
    group, _ = play()
    forked, _ = play(at="each_turn", width=3)
    said = [[[turn.text for turn in one.turns] for one in each.rollouts] for each in (group, forked)]
    assert said[0] == said[1]
    assert [one.reward for one in group.rollouts] == [one.reward for one in forked.rollouts]
    assert not any(one.forks for one in group.rollouts)


def test_forks_have_seeds_and_names_of_their_own_and_the_same_each_time():
    first, again = (play(at="each_turn", width=2)[0].all_rollouts for _ in range(2))
    assert [(one.id, one.seed, one.reward) for one in first] == [(one.id, one.seed, one.reward) for one in again]
    assert len({one.seed for one in first}) == len({one.id for one in first}) == len(first)
    assert [one.id for one in first[:3]] == ["g-0", "g-0.t2.1", "g-0.t2.2"]
    assert {(one.group, one.index) for one in first[:7]} == {("g", 0)}


def test_forks_from_one_state_share_the_request_of_their_first_turn():
    _, sampler = play(count=1, at="fixed", turns=[3], width=3)
    assert sampler.counts.count(3) == 1


def test_fixed_turns_are_those_that_are_named():
    group, _ = play(at="fixed", turns=[2, 4, 9], width=1)
    assert [[fork.fork_turn for fork in one.forks] for one in group.rollouts] == [[1, 3], [1, 3]]


def test_uncertain_turns_are_those_that_were_least_likely():
    group, _ = play(at="uncertain", points=1, width=2)
    for rollout in group.rollouts:
        means = [-sum(turn.logprobs) / len(turn.logprobs) for turn in rollout.turns]
        expected = max(range(1, TURNS), key=lambda turn: means[turn])
        assert means[rollout.forks[0].fork_turn] == means[expected]
        assert len(rollout.forks) == 2


def test_the_budget_bounds_what_forks_are_expected_to_sample():
    cost = 3  # tokens of a turn, its end included
    for budget in (0, 2, 6, 14, 100):
        group, _ = play(at="each_turn", width=2, **({"budget": budget} if budget else {}))
        for rollout in group.rollouts:
            assert {len(turn.tokens) for turn in rollout.turns} == {cost}
            sampled = sum(fork.response_length for fork in rollout.forks)
            if budget:
                assert sampled <= budget
            assert bool(rollout.forks) == (budget != 2)
            assert ("rollout.branch.budget" in rollout.not_forked) == (budget == 2)


@pytest.mark.parametrize(
    ("env", "reason"), [(Elsewhere, "has a close of its own"), (Stubborn, "TypeError: cannot be copied")]
)
def test_a_world_that_cannot_be_copied_is_played_without_forks_and_says_why(env: type[BaseTextEnv], reason: str):
    group, _ = play(env, at="each_turn")
    assert all(one.is_graded and not one.forks for one in group.rollouts)
    assert all(reason in one.not_forked for one in group.rollouts)


def test_a_fork_is_not_played_in_a_world_that_answers_otherwise_when_turns_are_repeated():
    group, _ = play(Moody, at="each_turn", width=1, replay=True)
    assert all(one.is_graded and not one.not_forked for one in group.rollouts)
    forks = [fork for one in group.rollouts for fork in one.forks]
    assert {fork.stop for fork in forks} == {RolloutStop.ENV_INIT_FAILED}
    assert all("answered turn 1 otherwise than before" in (fork.error or "") for fork in forks)
    assert not any(fork.is_graded or fork.turns for fork in forks)


def test_forks_count_as_rollouts_for_concurrency():
    _, sampler = play(at="each_turn", width=2)
    assert sampler.most_at_once <= 4  # 3 at a time; a shared request has the sequence of one that waits
