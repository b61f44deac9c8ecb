"""The bridge as a Ray actor, with the interface of NeMo RL's own, and its stream over the actor's restarts.

Owns: what Ray needs to know. Never touches: the bridge's work.

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

from palestra.gym.bridge import GymBridge, Streamed
from palestra.gym.bridge_results import TokenDecoder
from palestra.gym.collect.rows import Row
from palestra.gym.records import ROW_INDEX
from palestra.util.json_types import JsonMapping

RESTART_S = 1.0
RESTARTS = 30  # an actor that is started again takes seconds


@ray.remote(max_restarts=-1, max_task_retries=-1)
class NemoGym:
    """A restarted one starts its gym again by itself. Its tokenizer is gone then, and with it the texts beside the ids,
    until it is set again."""

    def __init__(self, cfg: JsonMapping) -> None:
        self._bridge = GymBridge(cfg)

    async def _spinup(self) -> None:
        await self._bridge.spin_up()

    async def health_check(self) -> None:
        await self._bridge.health_check()

    async def set_tokenizer(self, tokenizer: TokenDecoder | None) -> None:
        self._bridge.set_tokenizer(tokenizer)

    # Not tried again by Ray: it would skip as many results as it has handed on, and they come in another order.
    @ray.method(max_task_retries=0)
    async def run_rollouts(
        self, nemo_gym_examples: list[Row], timer_prefix: str, deduplicate_multimodal_data: bool = False
    ) -> AsyncGenerator[Streamed]:
        if deduplicate_multimodal_data:
            raise ValueError("deduplicate_multimodal_data: images are not supported")
        async for one in self._bridge.run_rollouts(nemo_gym_examples, timer_prefix):
            yield one

    async def counts(self) -> dict[str, int]:
        """Rows, failures and masks since the actor began."""
        return dict(self._bridge.counts)

    async def shutdown(self) -> None:
        await self._bridge.shutdown()


async def every_row(actor: Any, rows: Sequence[Row], timer_prefix: str = "timing") -> AsyncIterator[Streamed]:
    """What `run_rollouts` gives, each row once, also where the actor dies on the way: what had not come is asked for
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
