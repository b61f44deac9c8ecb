"""Many rollouts: both styles play the same, nothing is lost, and all of it ends when nobody listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments import EnvironmentSet
from palestra.rollouts.local.lockstep import BatchedRollouts, split_batches
from palestra.rollouts.local.player import LocalRollouts, PlayerContext
from palestra.rollouts.policy_sampler import PolicySampler, SamplingError
from palestra.rollouts.rollout_loop import RolloutSettings
from palestra.rollouts.seeds import group_seeds
from palestra.training.loops.grpo_setup import open_source
from palestra.types.rollouts import Group, GroupRequest, Rollout, RolloutStop
from tests.properties import examples
from tests.training.records import make_config
from tests.training.scripted import Asked, HangingSampler, ScriptedEnv, ScriptedSampler, a_request, a_table, until
from tests.training.scripted import chat_tokenizer as tokenizer

Style = Callable[[PlayerContext], LocalRollouts | BatchedRollouts]
STYLES = [LocalRollouts, BatchedRollouts]
DONE = {"done": True, "reward": 1.0}


async def collect(source: Any, requests: Sequence[GroupRequest], sampler: PolicySampler) -> list[Group]:
    return [group async for group in source.play(requests, sampler)]


def play_all(style: Style, requests: Sequence[GroupRequest], sampler: PolicySampler, **table: Any) -> list[Group]:
    async def run() -> list[Group]:
        with a_table(**table) as made:
            return await collect(style(made), requests, sampler)

    return asyncio.run(run())


def by_seed(asked: Asked) -> str:
    """A policy whose words depend on the seed and on all it has read."""
    return f"{(asked.params.seed or 0) % 997} after {sum(asked.prompt) % 991}"


def without_times(rollout: Rollout) -> dict[str, Any]:
    record = msgspec.to_builtins(rollout)
    for turn in record["turns"]:
        del turn["sample_s"], turn["env_s"]
    del record["seconds"]
    return record


@pytest.mark.parametrize("failing", [0, 1])
def test_the_slowest_of_an_oversampled_group_are_cancelled_and_those_that_fail_are_replaced(failing: int) -> None:
    """Rollout 0 is the slow one, and where one fails, it is rollout 1."""

    class Slow(ScriptedSampler):
        async def sample(self, prompt: Sequence[int], params: Any, count: int = 1, pictures: Any = ()) -> list[Any]:
            answers = await super().sample(prompt, params, count)
            if params.seed == request.seeds[0]:
                await asyncio.Event().wait()
            if failing and params.seed == request.seeds[1]:
                raise SamplingError("oh")
            return answers

    request = a_request(count=3, steps=[DONE])
    (group,) = play_all(LocalRollouts, [request], Slow("x"), oversample=1 + failing, max_tokens=300)
    assert [rollout.index for rollout in group.rollouts] == [index for index in range(1, 5) if index != failing][:3]
    assert len({rollout.seed for rollout in group.rollouts}) == 3
    assert all(rollout.reward == 1.0 for rollout in group.rollouts)


def test_a_group_of_which_too_many_fail_has_the_size_that_was_wanted() -> None:
    request = a_request(count=2, steps=[{"raise": "oh"}])
    (group,) = play_all(LocalRollouts, [request], ScriptedSampler("x"), oversample=2)
    assert [(rollout.index, rollout.has_failed) for rollout in group.rollouts] == [(0, True), (1, True)]


STEPS = st.lists(
    st.sampled_from([{}, {"reward": 0.5}, {"reward": None}, {"slow": 3}, {"raise": "oh"}, {"observations": []}, DONE]),
    min_size=1,
    max_size=4,
)
REQUESTS = st.lists(st.tuples(st.integers(1, 4), STEPS, st.booleans()), min_size=1, max_size=5)


def requests_of(drawn: list[tuple[int, list[Any], bool]]) -> list[GroupRequest]:
    return [
        a_request(f"g{i}", count, steps=steps, max_turns=4, init={"raise": "no"} if is_broken else {})
        for i, (count, steps, is_broken) in enumerate(drawn)
    ]


@examples(40)
@given(REQUESTS, st.integers(1, 8))
def test_both_styles_play_the_same_rollouts(drawn: list[tuple[int, list[Any], bool]], concurrency: int) -> None:
    requests = requests_of(drawn)
    played = [play_all(style, requests, ScriptedSampler(by_seed), concurrency=concurrency) for style in STYLES]
    one, other = ({group.id: list(map(without_times, group.rollouts)) for group in groups} for groups in played)
    assert one == other


@examples(40)
@given(REQUESTS, st.integers(1, 8), st.sets(st.integers(0, 6)), st.sampled_from(STYLES))
def test_every_rollout_asked_for_comes_back_once(
    drawn: list[tuple[int, list[Any], bool]], concurrency: int, fails: set[int], style: Style
) -> None:
    def says(asked: Asked) -> str:
        if (asked.params.seed or 0) % 7 in fails:
            raise SamplingError("not today")
        return "x"

    requests = requests_of(drawn)
    groups = play_all(style, requests, ScriptedSampler(says), concurrency=concurrency)
    assert sorted(group.id for group in groups) == sorted(request.id for request in requests)
    for request in requests:
        (group,) = (group for group in groups if group.id == request.id)
        assert (group.task, group.step) == (request.task, request.step)
        assert [rollout.index for rollout in group.rollouts] == list(range(len(request.seeds)))
        assert tuple(rollout.seed for rollout in group.rollouts) == request.seeds
        for rollout in group.rollouts:
            assert rollout.stop.is_failure == (rollout.error is not None)
            assert not (rollout.stop.is_failure and rollout.reward is not None)


@pytest.mark.parametrize("style", STYLES)
def test_only_so_many_play_at_once(style: Style) -> None:
    sampler = ScriptedSampler("x")
    requests = [a_request(f"g{i}", 3, steps=[{}, {"slow": 2}, DONE]) for i in range(5)]
    play_all(style, requests, sampler, concurrency=6)
    assert sampler.most_at_once == 6
    assert len(sampler.asked) == 45


@pytest.mark.parametrize("style", STYLES)
def test_the_limit_holds_for_all_who_ask(style: Style) -> None:
    sampler = ScriptedSampler("x")

    async def run() -> None:
        with a_table(concurrency=4) as table:
            source = style(table)
            await asyncio.gather(
                *(collect(source, [a_request(f"g{i}", 3, steps=[{}, DONE])], sampler) for i in range(5))
            )

    asyncio.run(run())
    assert sampler.most_at_once <= 4
    assert len(sampler.asked) == 30


def test_a_group_larger_than_the_limit_is_still_one_batch() -> None:
    (group,) = play_all(BatchedRollouts, [a_request("g", 5, steps=[DONE])], ScriptedSampler("x"), concurrency=2)
    assert len(group.rollouts) == 5


def test_batches_hold_whole_groups() -> None:
    requests = [a_request(str(i), count) for i, count in enumerate([2, 3, 1, 9, 4, 4])]
    batches = [[len(request.seeds) for request in batch] for batch in split_batches(requests, 8)]
    assert batches == [[2, 3, 1], [9], [4, 4]]
    assert list(split_batches([], 8)) == []


def test_batched_rollouts_sample_together_and_step_together() -> None:
    requests = [a_request("long", 2, steps=[{"slow": 9}, {}, DONE]), a_request("short", 2, steps=[DONE])]
    log: list[str] = []

    def says(_: Asked) -> str:
        ScriptedEnv.log.append("sample")
        return "x"

    async def run() -> None:
        with a_table() as table:
            await collect(BatchedRollouts(table), requests, ScriptedSampler(says))
            log.extend(event for event in ScriptedEnv.log if event in ("init", "sample", "step"))

    asyncio.run(run())
    expected = ["init"] * 4 + ["sample"] * 4 + ["step"] * 4 + (["sample"] * 2 + ["step"] * 2) * 2
    assert log == expected


@pytest.mark.parametrize("style", STYLES)
def test_groups_come_as_they_finish(style: Style) -> None:
    requests = [a_request("long", 2, steps=[{"slow": 20}, {}, {}, DONE]), a_request("short", 2, steps=[DONE])]
    assert [group.id for group in play_all(style, requests, ScriptedSampler("x"))] == ["short", "long"]


@pytest.mark.parametrize("style", STYLES)
def test_one_that_hangs_times_out_alone(style: Style) -> None:
    requests = [a_request("stuck", 1, steps=[{"hang": True}]), a_request("fine", 2, steps=[{}, {}, DONE])]
    groups = {group.id: group for group in play_all(style, requests, ScriptedSampler("x"), timeout_s=2)}
    assert groups["stuck"].rollouts[0].stop is RolloutStop.TIMEOUT
    assert [rollout.stop for rollout in groups["fine"].rollouts] == [RolloutStop.DONE] * 2


@pytest.mark.parametrize("style", STYLES)
def test_no_requests_no_groups(style: Style) -> None:
    assert play_all(style, [], ScriptedSampler("x")) == []


@pytest.mark.parametrize("style", STYLES)
def test_a_fault_ends_all_and_is_raised_as_it_is(style: Style) -> None:
    def says(asked: Asked) -> str:
        if len(sampler.asked) > 5:
            raise ZeroDivisionError
        return "x"

    sampler = ScriptedSampler(says)
    requests = [a_request(f"g{i}", 3, steps=[{}]) for i in range(4)]
    with pytest.raises(ZeroDivisionError):
        play_all(style, requests, sampler, concurrency=6)
    assert ScriptedEnv.log.count("close") == ScriptedEnv.log.count("init")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("how", ["leave", "cancel", "close"])
def test_what_nobody_waits_for_any_more_is_ended(style: Style, how: str) -> None:
    requests = [a_request("short", 2, steps=[DONE]), a_request("endless", 2, steps=[{}, {"hang": True}])]

    async def take_one(source: LocalRollouts | BatchedRollouts) -> None:
        async with aclosing(source.play(requests, ScriptedSampler("x"))) as groups:  # pyright: ignore[reportArgumentType]
            async for group in groups:
                assert group.id == "short"
                if how != "cancel":
                    break
            if how == "close":
                await source.close()

    async def run() -> None:
        with a_table() as table:
            source = style(table)
            task = asyncio.create_task(take_one(source))
            await asyncio.wait([task], timeout=0.05)
            if how == "cancel":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled() == (how == "cancel")
            assert not ScriptedEnv.alive
            assert len(asyncio.all_tasks()) == 1
            # And the room they took is free again.
            await collect(source, requests[:1], ScriptedSampler("x"))

    asyncio.run(run())


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("how", ["cancel", "close"])
def test_an_environment_that_is_being_closed_is_not_interrupted(style: Style, how: str) -> None:
    async def run() -> None:
        with a_table() as table:
            source = style(table)
            listening = asyncio.create_task(
                collect(source, [a_request("g", 2, steps=[DONE], close_s=0.1)], ScriptedSampler("x"))
            )
            await until(lambda: "closing" in ScriptedEnv.log)
            if how == "cancel":
                listening.cancel()
            else:
                await source.close()
            await asyncio.gather(listening, return_exceptions=True)
            assert ScriptedEnv.log.count("close") == ScriptedEnv.log.count("init") == 2

    asyncio.run(run())


@pytest.mark.parametrize("style", STYLES)
def test_closing_waits_for_the_environments(style: Style) -> None:
    async def run() -> None:
        with a_table() as table:
            source = style(table)
            listening = asyncio.create_task(collect(source, [a_request("g", 3)], HangingSampler("x")))
            await until(lambda: len(ScriptedEnv.alive) == 3)
            await source.close()
            assert not ScriptedEnv.alive
            await asyncio.gather(listening, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("style", STYLES)
def test_closing_does_not_break_off_environments_that_are_closing(style: Style) -> None:
    async def run() -> None:
        with a_table() as table:
            source = style(table)
            request = a_request("g", 2, close_s=0.1)
            listening = asyncio.create_task(collect(source, [request], HangingSampler("x")))
            await until(lambda: len(ScriptedEnv.alive) == 2)
            listening.cancel()
            await until(lambda: ScriptedEnv.log.count("closing") == 2)
            await source.close()
            assert not ScriptedEnv.alive

    asyncio.run(run())


def test_a_config_names_the_style_and_an_evaluation_its_temperature() -> None:
    with a_table() as table:
        for style, kind in (("async", LocalRollouts), ("batched", BatchedRollouts)):
            config = make_config(rollout={"style": style, "max_tokens": 5})
            assert type(open_source(config, tokenizer(), table.environments)) is kind
    settings = RolloutSettings.of(config.rollout, temperature=0.0)
    assert (settings.max_tokens, settings.temperature) == (5, 0.0)
    assert RolloutSettings.of(config.rollout).temperature == 1.0


@pytest.mark.parametrize("style", STYLES)
def test_a_bundled_environment_without_async_methods_is_played_in_threads(style: Style) -> None:
    async def run() -> list[Group]:
        with EnvironmentSet([EnvironmentEntry(name="arithmetic")], env_threads=4, env_timeout_s=10) as environments:
            (found,) = environments.tasks("train")
            tasks = list(found.tasks[:6])
            answers = {task.prompt[0]["content"]: task.extras["answer"] for task in tasks}

            def says(asked: Asked) -> str:
                question = next(q for q in answers if q in tokenizer().decode(asked.prompt))
                is_right = asked.params.seed in right
                return f"It is {answers[question] if is_right else 'unknown'}."

            seeds = group_seeds(3, "test")
            right = {seeds[0], seeds[2]}
            requests = [GroupRequest(id=task.id, task=task, step=0, seeds=seeds) for task in tasks]
            table = PlayerContext(tokenizer(), environments, RolloutSettings(max_tokens=64, max_context=256))
            return await collect(style(table), requests, ScriptedSampler(says))

    groups = asyncio.run(run())
    assert len(groups) == 6
    for group in groups:
        assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0, 1.0]
        assert {rollout.stop for rollout in group.rollouts} == {RolloutStop.DONE}
