"""A claim and what comes for it, one turn of the loop apart."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from palestra.config.serve import EpisodesConfig
from palestra.server.broker.board_writer import NotSaved
from palestra.server.broker.claims import Claim
from palestra.types.episodes import ClaimRequest, Lease, NewGroup
from tests.server.episodes.test_bulk import TASK, opened


def test_what_comes_before_a_claim_begins_to_wait_is_not_missed(tmp_path: Path) -> None:
    async def work() -> list[Lease]:
        async with opened(tmp_path) as (episodes, _):

            async def hold(wait: Coroutine[Any, Any, list[Lease]]) -> list[Lease]:
                groups = [NewGroup(group_id="late", task=TASK, size=1)]
                await episodes.broker.do(lambda board, now: board.register("alice", "r", groups, now))
                return await wait

            request = ClaimRequest(client_id="p", claim_id="c", run="r", wait_s=60)
            return await asyncio.wait_for(episodes.claims.claim(Claim("alice", request), hold), 20)

    (lease,) = asyncio.run(work())
    assert lease.attempt == 1


class FullDisk:
    def __init__(self) -> None:
        self.began, self.is_full = asyncio.Event(), asyncio.Event()

    async def fail_later(self, _work: Any) -> None:
        self.began.set()
        await self.is_full.wait()
        raise OSError("full")


def test_a_claim_that_waits_is_not_told_what_could_not_be_saved(tmp_path: Path) -> None:
    """It was served from what stands on a write that fails before the claim looks."""

    async def work() -> Any:
        async with opened(tmp_path) as (episodes, store):
            broker, writes = episodes.broker, FullDisk()
            request = ClaimRequest(client_id="p", claim_id="c", run="r", wait_s=60)
            claim = asyncio.create_task(episodes.claims.claim(Claim("alice", request)))
            await asyncio.sleep(0.05)
            await broker.saving.saved()
            write, store.write = store.write, writes.fail_later
            broker.apply(lambda board, now: board.put_run("alice", "another", now))
            await writes.began.wait()
            groups = [NewGroup(group_id="late", task=TASK, size=1)]
            broker.apply(lambda board, now: board.register("alice", "r", groups, now))
            store.write = write
            writes.is_full.set()
            return await asyncio.wait_for(asyncio.gather(claim, return_exceptions=True), 20)

    (response,) = asyncio.run(work())
    assert isinstance(response, NotSaved), response


def test_what_is_due_soon_does_not_wake_the_clock_at_every_call(tmp_path: Path) -> None:
    async def work() -> int:
        async with opened(tmp_path, EpisodesConfig(min_lease_s=0.2)) as (episodes, _):
            broker, ticks = episodes.broker, 0

            def tick() -> None:
                nonlocal ticks
                ticks += 1
                real()

            groups = [NewGroup(group_id="g", task=TASK, size=1)]
            await broker.do(lambda board, now: board.register("alice", "r", groups, now))
            await episodes.claims.claim(Claim("alice", ClaimRequest(client_id="p", claim_id="c", lease_s=0.2)))
            await asyncio.sleep(0.05)  # now the lease's end is what the clock waits for
            real, broker._tick = broker._tick, tick
            for _ in range(200):
                await broker.do(lambda board, _now: board.run_info("alice", "r"))
            return ticks

    assert asyncio.run(work()) < 20
