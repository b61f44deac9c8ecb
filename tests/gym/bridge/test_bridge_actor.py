"""The bridge as a Ray actor: NeMo RL's calls, and an actor that is killed in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.gym.bridge.conftest import row
from tests.gym.bridge.test_bridge import Words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_the_calls_of_nemo_rl(ray: Any, bridge_config: dict[str, Any]) -> None:
    from palestra.gym.bridge_actor import NemoGym

    async def main() -> list[Any]:
        actor = NemoGym.remote(bridge_config)
        await actor._spinup.remote()
        await actor.set_tokenizer.remote(Words())
        await actor.health_check.remote()
        rows = [row(wish, index) for index, wish in enumerate(["well", "break", "fail"])]
        found = [await one async for one in actor.run_rollouts.remote(rows, "timing/rollout")]
        assert await actor.counts.remote() == {"rows": 3, "masked_not_contiguous": 1, "failed": 1}
        empty = [one async for one in actor.run_rollouts.remote([], "timing")]
        with pytest.raises(ray.exceptions.RayTaskError, match="no rows to play"):
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


def test_an_actor_that_dies_comes_back_and_no_row_is_lost_or_there_twice(
    ray: Any, bridge_config: dict[str, Any]
) -> None:
    from palestra.gym.bridge_actor import NemoGym, every_row
    from palestra.gym.bridge_order import in_order

    rows = [row("slow" if index % 2 else "well", index) for index in range(40)]

    async def main() -> list[dict[str, Any]]:
        actor = NemoGym.remote(bridge_config)

        async def hurt() -> Any:
            count = 0
            async for one in every_row(actor, rows):
                count += 1
                if count in (5, 25):
                    ray.kill(actor, no_restart=False)
                yield one

        results, _ = await in_order(hurt(), len(rows))
        await actor.shutdown.remote()
        ray.kill(actor)
        return results

    results = asyncio.run(main())
    assert all(len(one["message_log"]) == 4 for one in results)
    assert not any(one["full_result"].get("mask_sample") for one in results)
