"""A gym as a Ray actor: NeMo RL's calls, and an actor that is killed in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gym.nemo_rl.conftest import AGENT, row
from tests.gym.nemo_rl.test_rollouts import Words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_the_calls_of_an_actors_own_interface(ray: Any, nemo_rl_config: dict[str, Any]) -> None:
    from palestra.gym.nemo_rl.ray_actor import NemoGym

    async def main() -> list[Any]:
        actor = NemoGym.remote(nemo_rl_config)
        await actor._spinup.remote()
        await actor.set_tokenizer.remote(Words())
        await actor.health_check.remote()
        rows = [row(wish, index) for index, wish in enumerate(["well", "break", "fail"])]
        found = [await one async for one in actor.run_rollouts.remote(rows, "timing/rollout")]
        counts = await actor.counts.remote()
        assert counts == {"rows": 3, "masked_not_contiguous": 1, "failed": 1, "failed_model_error": 1}
        empty = [one async for one in actor.run_rollouts.remote([], "timing")]
        with pytest.raises(ray.exceptions.RayTaskError, match="there are no rows to play"):
            await empty[0]
        await actor.shutdown.remote()
        ray.kill(actor)
        return found

    found = asyncio.run(main())
    assert sorted(index for index, _, _ in found) == [0, 1, 2]
    assert [timing is not None for _, _, timing in found] == [False, False, True]
    (well,) = [result for index, result, _ in found if index == 0]
    assert [one["token_ids"].tolist() for one in well["message_log"]] == [[10, 11], [20, 21], [9], [20, 21]]
    assert well["full_result"]["response"]["output"][0]["generation_str"] == "20 21"


async def gym_rollout(actor: Any, rows: list[dict[str, Any]], size: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The calls that NeMo RL's `run_nemo_gym_rollout` makes of the actor and of what comes from it, in their order."""
    for index, one in enumerate(rows):
        params = one["responses_create_params"]
        params |= {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": min(params.get("max_output_tokens", 64), 64)}
        one["_rowidx"] = index
    stream = actor.run_rollouts.options(num_returns="streaming").remote(rows, "timing/rollout", False)
    iterator = stream.__aiter__()
    groups: dict[int, dict[int, dict[str, Any]]] = {}
    metrics: dict[str, Any] = {}
    whole: list[int] = []
    while True:
        try:
            future = await anext(iterator)
        except StopAsyncIteration:
            break
        index, result, timing = await future
        metrics |= timing or {}
        said = [one for one in result["message_log"] if one["role"] == "assistant"]
        for messages, key in (
            (result["input_message_log"], "token_ids"),
            (result["message_log"], "token_ids"),
            (said, "generation_logprobs"),
        ):
            for message in messages:
                message[key] = torch.as_tensor(message[key])
        group = groups.setdefault(index // size, {})
        assert index not in group
        group[index] = result
        if len(group) == size:
            whole.append(index // size)
    assert sorted(whole) == list(range(len(rows) // size)), "a group did not get whole"
    return [groups[index // size][index] for index in range(len(rows))], metrics


def as_batch(rows: list[dict[str, Any]], results: list[dict[str, Any]]) -> dict[str, Any]:
    """What it then makes of the results: figures of each agent, a table, and the columns that are trained on."""
    figures: dict[str, list[float]] = {}
    for one, result in zip(rows, results, strict=True):
        assert json.dumps(result["full_result"]), "it is logged as a table"
        assert {message["role"] for message in result["message_log"]} == {"user", "assistant"}
        for key, value in result["full_result"].items():
            if isinstance(value, bool | int | float):
                figures.setdefault(f"{one['agent_ref']['name']}/{key}", []).append(float(value))
    prompts = [result["input_message_log"][0]["token_ids"] for result in results]
    flags = [bool((one["full_result"].get("instance_config") or {}).get("mask_sample", False)) for one in results]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True),
        "length": torch.tensor([len(prompt) for prompt in prompts]),
        "total_reward": torch.tensor([result["full_result"]["reward"] for result in results]),
        "mask_sample": torch.tensor(flags),
        "figures": figures,
    }


def test_the_calls_of_nemo_rls_rollout_in_their_order(ray: Any, nemo_rl_config: dict[str, Any]) -> None:
    """40 rows in groups of four; in each a row fails, and one names an agent that is not there."""
    from palestra.gym.nemo_rl.ray_actor import NemoGym

    wishes = ["well", "fail", "slow", "lost"] * 10
    rows = [row(wish, 0, _ng_task_index=index // 4) for index, wish in enumerate(wishes)]
    for one in rows[3::4]:
        one["agent_ref"] = {"name": "nobody"}
    actor = NemoGym.options(runtime_env={"env_vars": {"GYM_TEST": "1"}}).remote(nemo_rl_config)
    ray.get(actor._spinup.remote())
    ray.get(actor.set_tokenizer.remote(Words()))
    results, metrics = asyncio.run(gym_rollout(actor, rows, 4))
    ray.get(actor.shutdown.remote())
    ray.kill(actor)

    batch = as_batch(rows, results)
    assert batch["mask_sample"].tolist() == [False, True, False, True] * 10
    assert batch["total_reward"].shape == (40,)
    assert batch["length"].tolist() == [2, 1, 2, 1] * 10
    assert batch["input_ids"].dtype == torch.int64
    assert batch["figures"][f"{AGENT}/reward"] == [0.0] * 30
    assert (metrics["timing/rollout/failed"], metrics["timing/rollout/failed_unknown_agent"]) == (20.0, 10.0)
    assert 0 <= metrics["timing/rollout/postprocess_results_pct"] <= 100


def test_an_actor_that_dies_comes_back_and_no_row_is_lost_or_there_twice(
    ray: Any, nemo_rl_config: dict[str, Any]
) -> None:
    from palestra.gym.nemo_rl.ray_actor import NemoGym, every_row
    from palestra.gym.nemo_rl.result_order import in_order

    rows = [row("slow" if index % 2 else "well", index) for index in range(200)]

    async def main() -> list[dict[str, Any]]:
        actor = NemoGym.remote(nemo_rl_config)

        async def hurt() -> Any:
            count = 0
            async for one in every_row(actor, rows):
                count += 1
                if count in (5, 120):
                    ray.kill(actor, no_restart=False)
                yield one

        results, _ = await in_order(hurt(), len(rows))
        await actor.shutdown.remote()
        ray.kill(actor)
        return results

    results = asyncio.run(main())
    assert all(len(one["message_log"]) == 4 for one in results)
    assert not any(one["full_result"].get("mask_sample") for one in results)
