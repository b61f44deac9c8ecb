"""A gym as a Ray actor with the interface of NeMo RL's own, whose stream of results survives restarts of the actor.

For example:

    actor = NemoGym.remote({"model_name": ..., "base_urls": [...], "initial_global_config_dict": {...}})
    await actor._spinup.remote()
    await actor.set_tokenizer.remote(tokenizer)
    async for index, result, timing in every_row(actor, rows, "timing/rollout"):
        ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError  # pyright: ignore[reportMissingImports]

from palestra.gym.collect.rows import Row
from palestra.gym.nemo_rl.results import TokenDecoder
from palestra.gym.nemo_rl.rollouts import NemoRlGym, Streamed
from palestra.gym.records import ROW_INDEX
from palestra.util.json_types import JsonMapping

RESTART_S = 1.0
RESTARTS = 30  # restarting an actor takes seconds


@ray.remote(max_restarts=-1, max_task_retries=-1)
class NemoGym:
    """A gym that NeMo RL drives. A restarted actor starts its gym again by itself, but has lost its tokenizer: until it
    is set again, results have no texts beside the ids."""

    def __init__(self, cfg: JsonMapping) -> None:
        self._gym = NemoRlGym(cfg)

    async def _spinup(self) -> None:
        await self._gym.spin_up()

    async def health_check(self) -> None:
        await self._gym.health_check()

    async def set_tokenizer(self, tokenizer: TokenDecoder | None) -> None:
        self._gym.set_tokenizer(tokenizer)

    # Ray must not retry it: it would skip as many results as it has passed on, but they come in another order.
    @ray.method(max_task_retries=0)
    async def run_rollouts(
        self, nemo_gym_examples: list[Row], timer_prefix: str, deduplicate_multimodal_data: bool = False
    ) -> AsyncGenerator[Streamed]:
        if deduplicate_multimodal_data:
            raise ValueError("deduplicate_multimodal_data: images are not supported")
        async for one in self._gym.run_rollouts(nemo_gym_examples, timer_prefix):
            yield one

    async def counts(self) -> dict[str, int]:
        """Returns counts of rows, failures and masks since the actor began."""
        return dict(self._gym.counts)

    async def shutdown(self) -> None:
        await self._gym.shutdown()


async def every_row(actor: Any, rows: Sequence[Row], timer_prefix: str = "timing") -> AsyncIterator[Streamed]:
    """Yields what `run_rollouts` yields, each row once, even if the actor dies meanwhile: missing rows are requested
    again."""
    left = {row[ROW_INDEX]: row for row in rows}
    restarts = 0
    while left:
        try:
            async for reference in actor.run_rollouts.remote(list(left.values()), timer_prefix):
                index, result, timing = await reference
                del left[index]
                restarts = 0
                yield index, result, timing
        except RayActorError:
            restarts += 1
            if restarts > RESTARTS:
                raise
            await asyncio.sleep(RESTART_S)
