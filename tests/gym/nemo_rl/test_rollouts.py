"""A gym that NeMo RL drives, without Ray: results as they are finished, each row once, whatever happens to one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palestra.gym.errors import GymConfigError
from palestra.gym.nemo_rl.result_order import BrokenStream, in_groups, in_order, prepared
from palestra.gym.nemo_rl.results import NemoRlResultReader, NemoRlRowFailed, RowUnreachable
from palestra.gym.nemo_rl.rollouts import NemoRlGym, Streamed
from palestra.gym.nemo_rl.settings import read_nemo_rl_settings
from tests.gym.nemo_rl.conftest import AGENT, row
from tests.properties import examples

T = TypeVar("T")


class Words:
    def batch_decode(self, sequences: list[list[int]]) -> list[str]:
        return [" ".join(map(str, ids)) for ids in sequences]


def quiet(line: str) -> None:
    del line


def with_gym(config: dict[str, Any], use: Callable[[NemoRlGym], Awaitable[T]]) -> T:
    async def main() -> T:
        gym = NemoRlGym(config, quiet)
        gym.set_tokenizer(Words())
        try:
            return await use(gym)
        finally:
            await gym.shutdown()

    return asyncio.run(asyncio.wait_for(main(), 100))


def test_every_row_is_a_result_and_one_that_breaks_harms_no_other(nemo_rl_config: dict[str, Any]) -> None:
    wishes = ["slow", "well", "break", "nan", "fail", "call"]
    rows = [row(wish, index) for index, wish in enumerate(wishes)]
    wishes.append("unknown")
    rows.append(row("well", len(rows), agent_ref={"name": "guess_number_agent"}))

    async def use(gym: NemoRlGym) -> tuple[list[Streamed], Any]:
        streamed = [one async for one in gym.run_rollouts(rows, "timing/rollout")]
        await gym.health_check()
        return streamed, gym.counts

    streamed, counts = with_gym(nemo_rl_config, use)
    assert sorted(index for index, _, _ in streamed) == list(range(len(wishes)))
    assert streamed[0][0] != 0, "the slow one is not waited for"
    assert [timing is not None for _, _, timing in streamed] == [False] * 6 + [True]
    timing = streamed[-1][2] or {}
    assert timing["timing/rollout/masked_not_contiguous"] == 1
    assert timing["timing/rollout/failed"] == 3
    assert timing["timing/rollout/failed_unknown_agent"] == 1
    assert 0 <= timing["timing/rollout/postprocess_results_pct"] <= 100
    failed = {"failed": 3, "failed_bad_answer": 1, "failed_model_error": 1, "failed_unknown_agent": 1}
    assert counts == {"rows": 7, **failed, "masked_not_contiguous": 1}
    found = {wishes[index]: result for index, result, _ in streamed}

    log = found["well"]["message_log"]
    assert [one["role"] for one in log] == ["user", "assistant"] * 2
    assert [one["token_ids"].tolist() for one in log] == [[10, 11], [20, 21], [9], [20, 21]]
    assert log[1]["generation_logprobs"].tolist() == [-0.5, -0.25]
    assert (log[0]["token_ids"].dtype, log[1]["generation_logprobs"].dtype) == (torch.int64, torch.float32)
    assert found["well"]["input_message_log"] == log[:1]
    full = found["well"]["full_result"]
    assert full["reward"] == 0.0
    assert "mask_sample" not in full
    said = [one for one in full["response"]["output"] if "generation_str" in one]
    assert [(one["prompt_str"], one["generation_str"]) for one in said] == [
        ("10 11", "20 21"),
        ("10 11 20 21 9", "20 21"),
    ]
    assert not any("prompt_token_ids" in one for one in full["response"]["output"])
    assert [one["is_invalid_tool_call"] for one in found["call"]["message_log"] if one["role"] == "assistant"] == [
        True
    ] * 2

    assert len(found["break"]["message_log"]) == 2, "what hangs together stays"
    assert found["break"]["full_result"]["mask_sample"] is True
    assert found["break"]["full_result"]["mask_reason"] == "not_contiguous"
    assert found["break"]["full_result"]["instance_config"] == {"mask_sample": True}, "where NeMo RL looks for it"
    for wish in ("nan", "fail", "unknown"):
        full = found[wish]["full_result"]
        assert (full["mask_sample"], full["reward"], len(found[wish]["message_log"])) == (True, 0.0, 2)
        assert full["instance_config"] == {"mask_sample": True}
    assert "as you wished" in found["fail"]["full_result"]["failure_reason"]
    assert f"did you mean {AGENT}?" in found["unknown"]["full_result"]["failure_reason"]


@pytest.mark.slow
def test_a_strict_gym_ends_with_the_first_row_that_fails_and_starts_again_after_a_shutdown(
    nemo_rl_config: dict[str, Any],
) -> None:
    async def use(gym: NemoRlGym) -> list[Any]:
        async def play(wish: str) -> list[Any]:
            return [one async for one in gym.run_rollouts([row(wish, 0)])]

        with pytest.raises(NemoRlRowFailed, match="model call 2 does not begin"):
            await play("break")
        with pytest.raises(RowUnreachable, match=r"model_error: .* answered 422: as you wished"):
            await play("fail")
        stranger = row("well", 0, agent_ref={"name": "nobody"})
        with pytest.raises(NemoRlRowFailed, match="unknown_agent") as refused:
            _ = [one async for one in gym.run_rollouts([stranger])]
        assert not isinstance(refused.value, RowUnreachable)
        await gym.shutdown()
        return await play("well")

    played = with_gym({**nemo_rl_config, "is_strict": True, "has_tensors": False}, use)
    assert played[0][1]["message_log"][0]["token_ids"] == [10, 11]


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([], "there are no rows to play"),
        ([row("well", 0), row("well", 0)], "_rowidx 0 occurs more than once"),
        ([{**row("well", 0), "_rowidx": "0"}], "needs _rowidx"),
        ([{**row("well", 3), "agent_ref": None}], "names no agent"),
    ],
)
def test_rows_that_cannot_be_told_apart_are_refused_before_anything_starts(
    rows: list[dict[str, Any]], error: str, nemo_rl_config: dict[str, Any]
) -> None:
    async def use(gym: NemoRlGym) -> None:
        async for _ in gym.run_rollouts(rows):
            raise AssertionError

    with pytest.raises(ValueError, match=error):
        with_gym(nemo_rl_config, use)


def test_settings_that_would_be_ignored_are_refused(nemo_rl_config: dict[str, Any]) -> None:
    off = {"require_routed_experts": False, "tokenizer_config": None, "use_fastokens": True}
    NemoRlGym({**nemo_rl_config, **off})
    for key in ("require_routed_experts", "token_capture", "unheard_of"):
        with pytest.raises(GymConfigError, match=key):
            NemoRlGym({**nemo_rl_config, key: {"enabled": True}})
    with pytest.raises(GymConfigError, match="base_urls"):
        NemoRlGym({**nemo_rl_config, "base_urls": "http://one"})


def test_a_result_without_a_reward_is_no_result(nemo_rl_config: dict[str, Any]) -> None:
    reader = NemoRlResultReader(read_nemo_rl_settings(nemo_rl_config))
    for reward in (None, "1", float("nan")):
        with pytest.raises(NemoRlRowFailed, match="its reward is not a number"):
            reader.read({"response": {"output": []}, "reward": reward})
    masked, flaw = reader.read({"response": {"output": []}, "reward": 1})
    assert flaw == "no_generation"
    assert masked["full_result"]["mask_sample"] is True
    assert [len(one["token_ids"]) for one in masked["message_log"]] == [1, 1]


# Order


async def stream_of(order: list[int]) -> AsyncIterator[Streamed]:
    for place, index in enumerate(order):
        yield index, {"of": index}, {"timing/x": 1.0} if place == len(order) - 1 else None


@examples(40)
@given(st.permutations(range(12)))
def test_results_come_back_in_the_order_of_their_rows(order: list[int]) -> None:
    results, timing = asyncio.run(in_order(stream_of(order), 12))
    assert [one["of"] for one in results] == list(range(12))
    assert timing == {"timing/x": 1.0}
    rows = [row("well", index, _ng_task_index=index // 3) for index in range(12)]

    async def groups() -> list[tuple[int, list[int]]]:
        stream = in_groups(stream_of(order), rows, 3)
        return [(number, [one["of"] for one in results]) async for number, results in stream]

    found = asyncio.run(groups())
    assert sorted(found) == [(number, [3 * number, 3 * number + 1, 3 * number + 2]) for number in range(4)]
    last = [max(order.index(3 * number + place) for place in range(3)) for number, _ in found]
    assert last == sorted(last), "in the order they get whole"


@pytest.mark.parametrize(
    ("order", "error"),
    [([0, 0, 1], "row 0 came twice"), ([0, 3], "a result came for row 3"), ([2, 0], "1 of 3 rows are missing")],
)
def test_a_stream_that_is_not_of_its_rows_is_told(order: list[int], error: str) -> None:
    with pytest.raises(BrokenStream, match=error):
        asyncio.run(in_order(stream_of(order), 3))


def test_a_group_is_of_one_agent_and_one_task() -> None:
    mixed = [row("well", 0, _ng_task_index=0), row("well", 1, _ng_task_index=1)]

    async def groups(size: int) -> None:
        async for _ in in_groups(stream_of([0, 1]), mixed, size):
            pass

    with pytest.raises(ValueError, match="do not share one agent and one task"):
        asyncio.run(groups(2))
    with pytest.raises(ValueError, match="groups of 3"):
        asyncio.run(groups(3))


def test_rows_are_numbered_and_sampled_as_training_wants() -> None:
    given = [{"responses_create_params": {"input": "a", "max_output_tokens": limit}} for limit in (5, 50, None)]
    made = prepared(
        [{**one, "agent_ref": {"name": AGENT}} for one in given], temperature=0.5, top_p=1.0, max_new_tokens=9
    )
    assert [one["_rowidx"] for one in made] == [0, 1, 2]
    assert [one["responses_create_params"]["max_output_tokens"] for one in made] == [5, 9, 9]
    assert {one["responses_create_params"]["temperature"] for one in made} == {0.5}
    assert "temperature" not in given[0]["responses_create_params"]
