"""First turns of a group: one request for all that begin alike, whoever comes first, and nobody waits for the lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest

from palestra.rollouts.local import first_turns
from palestra.rollouts.local.first_turns import MOST_TOKENS, FirstTurns
from palestra.rollouts.local.player import LocalRollouts
from palestra.rollouts.policy_sampler import SamplingError
from palestra.rollouts.seeds import group_seeds
from palestra.types import SampledSequence, SamplingParams, StopReason
from palestra.types.pictures import PictureFile, PromptPicture
from tests.training.scripted import Asked, HangingSampler, ScriptedSampler, a_request, a_table, until

DONE = {"done": True, "reward": 1.0}
SEEDS = group_seeds(3, "test")


@pytest.fixture(autouse=True)
def _all_the_time_of_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes late on a busy machine is waited for here."""
    monkeypatch.setattr(first_turns, "PATIENCE_S", 300.0)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_turns, "PATIENCE_S", 0.01)


def echo(asked: Asked) -> SampledSequence:
    """A sequence that says whose seed it was drawn with."""
    tokens = [SEEDS.index(asked.params.seed or 0)]
    return SampledSequence(tokens=tokens, logprobs=[-1.0], stop_reason=StopReason.STOP)


async def first_turn(turns: FirstTurns, index: int, prompt: list[int], seeds: Sequence[int] = SEEDS) -> list[int]:
    await turns.join(index, prompt, SamplingParams(max_tokens=4, seed=seeds[index]))
    (sequence,) = await turns.sample(index)
    return sequence.tokens


async def first_turns_of(turns: FirstTurns, prompts: Mapping[int, list[int]]) -> dict[int, list[int]]:
    played = await asyncio.gather(*(first_turn(turns, index, prompt) for index, prompt in prompts.items()))
    return dict(zip(prompts, played, strict=True))


@pytest.mark.parametrize(
    ("prompts", "counts"), [([[7], [7], [7]], [3]), ([[7], [7], [8]], [2, 1]), ([[7], [8], [7]], [1, 1, 1])]
)
def test_each_gets_the_tokens_of_its_seed_whoever_comes_first(prompts: list[list[int]], counts: list[int]) -> None:
    for order in permutations(range(3)):
        sampler = ScriptedSampler(echo)
        turns = FirstTurns(sampler, range(3))
        played = asyncio.run(first_turns_of(turns, {index: prompts[index] for index in order}))
        assert played == {0: [0], 1: [1], 2: [2]}
        assert sorted(sampler.counts, reverse=True) == counts


def test_seeds_of_other_requests_are_not_shared() -> None:
    sampler = ScriptedSampler("x")

    async def run() -> None:
        turns = FirstTurns(sampler, range(3))
        await asyncio.gather(*(first_turn(turns, index, [5], seeds=[1, 2, 3]) for index in range(3)))

    asyncio.run(run())
    assert sorted(asked.params.seed or 0 for asked in sampler.asked) == [1, 2, 3]
    assert sampler.counts == [1, 1, 1]


def test_equal_tokens_with_other_pictures_are_another_prompt() -> None:
    sampler = ScriptedSampler(echo)
    files = [PictureFile(digest=digest, data=b"", media_type="image/png", height=8, width=8) for digest in "aba"]

    async def run() -> None:
        turns = FirstTurns(sampler, range(3))

        async def one(index: int) -> None:
            params = SamplingParams(max_tokens=4, seed=SEEDS[index])
            await turns.join(index, [5, 6], params, [PromptPicture(0, 1, files[index])])
            assert [one.tokens for one in await turns.sample(index)] == [[index]]

        await asyncio.gather(*map(one, range(3)))

    asyncio.run(run())
    assert sampler.counts == [1, 1, 1]


def test_long_turns_wait_for_nobody() -> None:
    sampler = ScriptedSampler(echo)

    async def run() -> None:
        turns = FirstTurns(sampler, range(3))
        await turns.join(0, [5], SamplingParams(max_tokens=MOST_TOKENS + 1, seed=SEEDS[0]))
        assert [one.tokens for one in await turns.sample(0)] == [[0]]
        played = await asyncio.gather(*(first_turn(turns, index, [5]) for index in (1, 2)))
        assert played == [[1], [2]]

    asyncio.run(run())
    assert sampler.counts == [1, 2]


def test_one_that_never_begins_is_not_waited_for() -> None:
    sampler = ScriptedSampler(echo)

    async def run() -> dict[int, list[int]]:
        turns = FirstTurns(sampler, range(3))
        others = asyncio.create_task(first_turns_of(turns, {0: [5], 1: [5]}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not sampler.asked
        turns.leave(2)
        return await others

    assert asyncio.run(run()) == {0: [0], 1: [1]}
    assert sampler.counts == [2]


def test_one_that_is_cancelled_leaves_the_others_theirs_and_the_last_ends_the_request() -> None:
    async def run() -> None:
        sampler = HangingSampler("x")
        turns = FirstTurns(sampler, range(2))
        one, other = (asyncio.create_task(first_turn(turns, index, [5])) for index in range(2))
        await until(lambda: sampler.at_once > 0)
        request = turns._requests[0]
        assert request.answer is not None
        for index, task in enumerate((one, other)):
            assert not request.answer.cancelling()
            task.cancel()
            await asyncio.wait([task])
            turns.leave(index)
        await asyncio.wait([request.answer])
        assert request.answer.cancelled()

    asyncio.run(run())


def test_too_few_sequences_are_an_error_for_all_who_share_them() -> None:
    class Short(ScriptedSampler):
        async def sample(
            self, prompt: object, params: object, count: int = 1, pictures: object = ()
        ) -> list[SampledSequence]:
            return [echo(Asked([], SamplingParams(seed=SEEDS[0])))]

    async def run() -> list[object]:
        turns = FirstTurns(Short("x"), range(2))
        return await asyncio.gather(*(first_turn(turns, index, [5]) for index in range(2)), return_exceptions=True)

    errors = asyncio.run(run())
    assert [type(error) for error in errors] == [SamplingError] * 2
    assert str(errors[0]) == "2 sequences were requested, but 1 came"


@pytest.mark.parametrize("concurrency", [16, 4])
def test_a_group_that_is_played_at_once_is_one_request(concurrency: int) -> None:
    assert counts_of_a_group_of_four(concurrency) == [4]


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("concurrency", [3, 1])
def test_a_group_that_is_not_played_at_once_is_not_waited_for(concurrency: int) -> None:
    counts = counts_of_a_group_of_four(concurrency)
    assert sum(counts) == 4
    assert max(counts) <= concurrency


def counts_of_a_group_of_four(concurrency: int) -> list[int]:
    sampler = ScriptedSampler("x")

    async def run() -> None:
        with a_table(concurrency=concurrency) as table:
            async for group in LocalRollouts(table).play([a_request("g", 4, steps=[DONE])], sampler):
                assert [rollout.reward for rollout in group.rollouts] == [1.0] * 4

    asyncio.run(run())
    return sampler.counts


@pytest.mark.usefixtures("hurry")
def test_an_environment_that_needs_the_place_of_another_gets_it() -> None:
    """The first two have both places until their rollouts end: they must not wait for the others."""

    async def run() -> None:
        request = a_request("g", 4, init={"places": 2}, steps=[DONE])
        with a_table() as table:
            async for group in LocalRollouts(table).play([request], ScriptedSampler("x")):
                assert [rollout.reward for rollout in group.rollouts] == [1.0] * 4

    asyncio.run(run())


@pytest.mark.usefixtures("hurry")
def test_nothing_is_sampled_any_more_when_a_source_is_closed() -> None:
    """Some of the second group have no place yet."""
    sampler = HangingSampler("x")

    async def run() -> None:
        with a_table(concurrency=4) as table:
            source = LocalRollouts(table)
            groups = source.play([a_request("a", 2), a_request("b", 4)], sampler)
            waiting = asyncio.ensure_future(anext(groups))
            await until(lambda: sampler.at_once > 1)
            waiting.cancel()
            await asyncio.wait([waiting])
            await source.close()
            await asyncio.sleep(0)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
