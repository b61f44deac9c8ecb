"""One rollout: its tokens are what was sampled, and whatever happens it is a record."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palestra.rollouts.local.player import PlayerContext, play_rollout
from palestra.rollouts.policy_sampler import SamplingError
from palestra.rollouts.seeds import derive_seed
from palestra.types import SampledSequence, SamplingParams, StopReason
from palestra.types.rollouts import Rollout, RolloutStop
from tests.properties import examples
from tests.training.scripted import (
    PROMPT,
    HangingSampler,
    Says,
    ScriptedEnv,
    ScriptedSampler,
    a_request,
    a_table,
    until,
)
from tests.training.scripted import chat_tokenizer as tokenizer

DONE = {"done": True, "reward": 1.0}


def play(
    says: Says | str | ScriptedSampler, *steps: dict[str, Any], table: dict[str, Any] | None = None, **extras: Any
):
    sampler = says if isinstance(says, ScriptedSampler) else ScriptedSampler(says)
    with a_table(**(table or {})) as made:
        return asyncio.run(play_rollout(made, a_request(steps=list(steps), **extras), 0, sampler))


def all_tokens(rollout: Rollout) -> list[int]:
    return rollout.prompt + [token for turn in rollout.turns for token in [*turn.observation, *turn.tokens]]


# Tokens

PIECES = st.sampled_from(["a", " b", "\n", "7", "<|im_end|>", "<|im_", "end|>", "<tool_call>", "🙂", "."])
TEXTS = st.lists(PIECES, max_size=6).map("".join)
TURNS = TEXTS.map(lambda text: "." + text)
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": TEXTS})
ROUNDS = st.lists(st.tuples(TURNS, st.lists(MESSAGE, max_size=2)), min_size=1, max_size=4)


@examples(60)
@given(ROUNDS, st.lists(MESSAGE, min_size=1, max_size=2))
def test_the_tokens_are_those_of_the_whole_conversation(rounds: list[tuple[str, list[Any]]], prompt: list[Any]) -> None:
    said = iter([turn for turn, _ in rounds])
    steps = [{"observations": back, "done": place == len(rounds)} for place, (_, back) in enumerate(rounds, 1)]
    rollout = play(lambda _: next(said), *steps, table={"max_tokens": 500}, init={"messages": prompt})

    assert rollout.stop is RolloutStop.DONE
    conversation = list(prompt)
    for turn, back in rounds:
        conversation += [{"role": "assistant", "content": turn}, *back]
    assert rollout.messages == conversation
    last = rounds[-1][1]
    whole = tokenizer().encode_chat(conversation[: len(conversation) - len(last)], add_generation_prompt=False)
    assert all_tokens(rollout) + tokenizer().encode_text("\n") == whole
    assert all(len(turn.tokens) == len(turn.logprobs) for turn in rollout.turns)
    assert rollout.turns[0].observation == []
    assert [turn.text for turn in rollout.turns] == [turn for turn, _ in rounds]


def test_each_prompt_is_everything_before_it() -> None:
    sampler = ScriptedSampler("on")
    rollout = play(sampler, {}, {}, DONE)
    assert [len(request.prompt) for request in sampler.asked] == sorted(
        {len(request.prompt) for request in sampler.asked}
    )
    for number, request in enumerate(sampler.asked):
        before = [t for turn in rollout.turns[:number] for t in [*turn.observation, *turn.tokens]]
        assert request.prompt == rollout.prompt + before + rollout.turns[number].observation


def test_a_turn_that_a_stop_string_ended_gets_its_end_in_the_observation() -> None:
    tokens = tokenizer().encode_text("stop here")
    sequence = SampledSequence(tokens=tokens, logprobs=[0.0] * len(tokens), stop_reason=StopReason.STOP)
    rollout = play(lambda _: sequence, {}, DONE)
    assert rollout.turns[0].tokens == tokens
    assert rollout.turns[1].observation[0] == tokenizer().turn_end
    assert tokenizer().decode(rollout.turns[1].observation, skip_special=False).startswith("<|im_end|>\n<|im_start|>")


def test_the_last_observation_is_for_readers_only() -> None:
    rollout = play("bye", {"done": True, "reward": 1.0, "observations": [{"role": "user", "content": "well done"}]})
    assert rollout.messages[-1]["content"] == "well done"
    assert all_tokens(rollout)[-1] == tokenizer().turn_end


def test_seeds_differ_by_turn_and_depend_on_the_rollout_alone() -> None:
    sampler = ScriptedSampler("x", version=7)
    rollout = play(sampler, {}, DONE, table={"temperature": 0.5, "top_p": 0.9, "top_k": 4})
    assert [request.params.seed for request in sampler.asked] == [100, derive_seed(100, 1)]
    params = sampler.asked[0].params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 4)
    assert params.stop_token_ids == tokenizer().stop_ids
    assert rollout.temperature == 0.5
    assert rollout.oldest_version == 7


def test_derived_seeds_are_fixed_for_ever() -> None:
    assert derive_seed("run", 0, "task", 3) == 3574716621438446851
    parts = [(), (1,), ("1",), (1, 1), (11,), ("ab", "c"), ("a", "bc"), ("abc",), ("\ud800",)]
    seeds = {derive_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)


# Ends


def test_rewards_add_up() -> None:
    rollout = play("x", {"reward": 0.25}, {"reward": -1}, {"reward": 2.0, "done": True})
    assert rollout.reward == 1.25
    assert [turn.reward for turn in rollout.turns] == [0.25, -1.0, 2.0]
    assert rollout.is_graded
    assert not rollout.is_cut
    assert rollout.metrics == {"turns": 3.0}
    assert (rollout.id, rollout.group, rollout.index, rollout.task) == ("g-0", "g", 0, "task-g")


def test_a_step_without_a_grade_leaves_the_rollout_without() -> None:
    rollout = play("x", {"reward": 1.0}, {"reward": None}, DONE)
    assert rollout.stop is RolloutStop.DONE
    assert rollout.reward is None
    assert not rollout.is_graded


def test_a_cut_turn_is_graded_and_ends_the_rollout() -> None:
    rollout = play("word " * 50, {"reward": 0.5}, table={"max_tokens": 4})
    assert rollout.stop is RolloutStop.LENGTH
    assert rollout.is_cut
    assert rollout.reward == 0.5
    assert len(rollout.turns) == 1


def test_a_cut_turn_stays_visible_where_the_environment_was_done() -> None:
    rollout = play("word " * 50, DONE, table={"max_tokens": 4})
    assert rollout.stop is RolloutStop.DONE
    assert rollout.is_cut
    assert rollout.reward == 1.0


@pytest.mark.parametrize("steps", [[{}], [{}, {"done": True, "metadata": {"done_reason": "max_turns"}}]])
def test_the_budget_of_turns_ends_it(steps: list[dict[str, Any]]) -> None:
    rollout = play("x", *steps, max_turns=2)
    assert rollout.stop is RolloutStop.MAX_TURNS
    assert len(rollout.turns) == 2
    assert rollout.reward == 0.0


def test_turns_are_cut_to_the_room_that_is_left() -> None:
    prompt = len(tokenizer().encode_chat(PROMPT))
    sampler = ScriptedSampler("a b c d e f g h")
    rollout = play(sampler, {}, table={"max_context": prompt + 5})
    assert sampler.asked[0].params.max_tokens == 5
    assert rollout.stop is RolloutStop.LENGTH
    assert len(all_tokens(rollout)) == prompt + 5


def test_room_that_the_turns_took_ends_it_with_what_it_has() -> None:
    rollout = play("word " * 10, {"reward": 0.5}, table={"max_context": 200})
    assert rollout.stop is RolloutStop.CONTEXT
    assert len(rollout.turns) >= 2
    assert rollout.reward == 0.5 * len(rollout.turns)
    assert "rollout.max_context" in (rollout.error or "")
    assert not rollout.is_cut


@pytest.mark.parametrize("reward", [0.0, 0.5])
def test_an_observation_that_never_had_room_is_no_grade(reward: float) -> None:
    observations = [{"role": "user", "content": "very " * 500}]
    rollout = play("x", {}, {"observations": observations, "reward": reward}, table={"max_context": 200})
    assert rollout.stop is RolloutStop.CONTEXT
    assert len(rollout.turns) == 2
    assert rollout.turns[1].reward == reward
    assert rollout.reward is None
    size = len(tokenizer().observation(observations))
    assert f"the observation has {size} tokens" in (rollout.error or "")
    assert "in 200 (rollout.max_context)" in (rollout.error or "")


@pytest.mark.parametrize(("room", "stop"), [(0, RolloutStop.CONTEXT), (1, RolloutStop.LENGTH)])
def test_a_prompt_needs_room_for_one_token(room: int, stop: RolloutStop) -> None:
    prompt = len(tokenizer().encode_chat(PROMPT))
    rollout = play("x y z", table={"max_context": prompt + room})
    assert rollout.stop is stop
    assert rollout.response_length == room
    assert (rollout.reward is None) == (room == 0)
    if room == 0:
        no_room = f"the prompt has {prompt} tokens: no room for a turn in {prompt} (rollout.max_context)"
        assert rollout.error == no_room


# Failures are records


@pytest.mark.parametrize(
    ("steps", "extras", "stop", "error"),
    [
        ([], {"init": {"raise": "no\nluck"}}, RolloutStop.ENV_INIT_FAILED, "no luck"),
        ([], {"init": {"messages": [{"role": "user", "content": 5}]}}, RolloutStop.ENV_INIT_FAILED, "'content' is"),
        ([{"raise": "x" * 5000}], {}, RolloutStop.ENV_FAILED, "xxx"),
        ([{}, {"reward": math.nan}], {}, RolloutStop.ENV_FAILED, "nan"),
        ([{"observations": [{"role": "user", "content": 5}]}], {}, RolloutStop.ENV_FAILED, "'content' is"),
        ([{"hang": True}], {}, RolloutStop.TIMEOUT, "rollout.timeout_s"),
        ([], {"init": {"hang": True}}, RolloutStop.TIMEOUT, "rollout.timeout_s"),
    ],
)
def test_an_environment_that_fails_is_a_record(
    steps: list[dict[str, Any]], extras: dict[str, Any], stop: RolloutStop, error: str
) -> None:
    rollout = play("x", *steps, table={"timeout_s": 0.05} if stop is RolloutStop.TIMEOUT else None, **extras)
    assert rollout.stop is stop
    assert rollout.reward is None
    assert rollout.error is not None
    assert error in rollout.error
    assert "\n" not in rollout.error
    assert len(rollout.error) <= 500
    assert "close" in ScriptedEnv.log


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_metrics_that_fail_leave_the_rollout_graded(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    logged: list[str] = []

    def get_metrics(env: ScriptedEnv) -> None:
        logged.extend(env.log)
        raise error

    monkeypatch.setattr(ScriptedEnv, "get_metrics", get_metrics)
    rollout = play("x", DONE)
    assert (rollout.reward, rollout.metrics, rollout.stop) == (1.0, {}, RolloutStop.DONE)
    assert logged == ["init", "step"], "asked before it is closed"


def _raise(error: Exception) -> Says:
    def says(_: Any) -> str:
        raise error

    return says


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (_raise(SamplingError("the server\nis gone")), "the server is gone"),
        (lambda _: SampledSequence(tokens=[5], logprobs=[], stop_reason=StopReason.STOP), "1 tokens with 0 logprobs"),
        (lambda _: SampledSequence(tokens=[5], logprobs=[0.0], stop_reason=StopReason.ABORT), "cancelled the sample"),
    ],
)
def test_a_sample_that_fails_is_a_record(says: Says, error: str) -> None:
    rollout = play(says, {})
    assert rollout.stop is RolloutStop.SAMPLING_FAILED
    assert rollout.reward is None
    assert error in (rollout.error or "")


def test_a_sampler_that_hangs_is_a_timeout() -> None:
    rollout = play(HangingSampler("x"), table={"timeout_s": 0.05})
    assert rollout.stop is RolloutStop.TIMEOUT
    assert rollout.turns == []
    assert rollout.seconds >= 0.05


def test_the_time_of_a_rollout_is_that_of_all_its_turns() -> None:
    rollout = play("x", {"sleep_s": 0.2}, table={"timeout_s": 0.5})
    assert rollout.stop is RolloutStop.TIMEOUT
    assert len(rollout.turns) <= 3
    assert rollout.turns[0].env_s >= 0.15


CALL, UNREADABLE = {"metadata": {"tool_calls": 1}}, {"metadata": {"parse_failed": True}}


@pytest.mark.parametrize(
    ("steps", "limits", "stop", "turns"),
    [
        ([CALL], {"max_tool_calls": 2}, RolloutStop.TOOL_CALLS, 2),
        ([{"metadata": {"tool_calls": 2}}], {"max_tool_calls": 3}, RolloutStop.TOOL_CALLS, 2),
        ([UNREADABLE, CALL, UNREADABLE], {"max_parse_failures": 2}, RolloutStop.PARSE_FAILURES, 4),  # in a row
        ([{}, {**CALL, **DONE}], {"max_tool_calls": 1}, RolloutStop.DONE, 2),
        ([CALL], {"max_tool_calls": None}, RolloutStop.MAX_TURNS, 5),
    ],
)
def test_limits_on_calls_and_on_turns_that_cannot_be_read_end_it(
    steps: list[dict[str, Any]], limits: dict[str, Any], stop: RolloutStop, turns: int
) -> None:
    rollout = play("x", *steps, table=limits, max_turns=5)
    assert (rollout.stop, len(rollout.turns), rollout.has_failed) == (stop, turns, False)


class HangsLater(ScriptedSampler):
    async def sample(
        self, prompt: Sequence[int], params: SamplingParams, count: int = 1, pictures: Any = ()
    ) -> list[SampledSequence]:
        if self.asked:
            await asyncio.Event().wait()
        return await super().sample(prompt, params, count)


@pytest.mark.parametrize(("grades", "reward"), [(True, 0.75), (False, None)])
def test_a_rollout_that_is_out_of_time_may_be_graded_as_it_stands(grades: bool, reward: float | None) -> None:
    limits = {"timeout_s": 0.2, "grades_timeouts": grades}
    rollout = play(HangsLater("x"), {"reward": 0.25}, table=limits, grade=0.5)
    assert (rollout.stop, rollout.reward, rollout.has_failed) == (RolloutStop.TIMEOUT, reward, not grades)
    assert len(rollout.turns) == 1


def test_a_rollout_that_is_out_of_time_in_a_step_keeps_the_rewards_that_it_has() -> None:
    limits = {"timeout_s": 0.2, "grades_timeouts": True}
    rollout = play("x", {"reward": 0.25}, {"sleep_s": 10}, table=limits, grade=0.5)
    assert (rollout.stop, rollout.reward) == (RolloutStop.TIMEOUT, 0.25)  # what the environment is now, nobody knows


def test_a_rollout_that_was_never_answered_is_no_grade() -> None:
    rollout = play(HangingSampler("x"), table={"timeout_s": 0.05, "grades_timeouts": True})
    assert (rollout.stop, rollout.reward, rollout.has_failed) == (RolloutStop.TIMEOUT, None, True)


def test_a_fault_of_the_sampler_is_raised_and_the_environment_closed() -> None:
    with pytest.raises(ZeroDivisionError):
        play(_raise(ZeroDivisionError()))
    assert ScriptedEnv.log == ["init", "closing", "close"]


@pytest.mark.parametrize("where", ["init", "step", "sample"])
def test_cancelled_anywhere_it_closes_the_environment(where: str) -> None:
    async def cancel_while_it_hangs(table: PlayerContext) -> None:
        hangs = {"hang": True}
        request = a_request(steps=[hangs], init=hangs if where == "init" else {})
        sampler = HangingSampler("x") if where == "sample" else ScriptedSampler("x")
        task = asyncio.create_task(play_rollout(table, request, 0, sampler))
        await until(lambda: ScriptedEnv.log[-1:] == ["step" if where == "step" else "init"])
        if where == "sample":
            await until(lambda: sampler.at_once == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with a_table() as table:
        asyncio.run(cancel_while_it_hangs(table))
    assert ScriptedEnv.log[-1] == "close"
