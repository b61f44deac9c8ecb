"""A claim and what comes for it, one turn of the loop apart."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from palestra.server.episodes.claims import Claim
from palestra.types.episodes import ClaimRequest, Lease, NewGroup
from tests.server.episodes.test_bulk import TASK, opened


def test_what_comes_before_a_claim_begins_to_wait_is_not_missed(tmp_path: Path) -> None:
    async def work() -> list[Lease]:
        async with opened(tmp_path) as (episodes, _):

            async def hold(wait: Coroutine[Any, Any, list[Lease]]) -> list[Lease]:
                groups = [NewGroup(group_id="late", task=TASK, size=1)]
                await episodes.broker.do(lambda board, now: board.register("alice", "r", groups, now))
                return await wait

            asked = ClaimRequest(client_id="p", claim_id="c", run="r", wait_s=60)
            return await asyncio.wait_for(episodes.claims.claim(Claim("alice", asked), hold), 20)

    (lease,) = asyncio.run(work())
    assert lease.attempt == 1
