"""Whatever order numbers arrive in, the stored block has those that a client may be waiting for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from palestra.server.core.samples.polling import BLOCK, CLONE_STRIDE, NumberBlock, block_name, stored_blocks
from palestra.store import Store

CLONE = 3
FIRST = CLONE * CLONE_STRIDE


def test_numbers_that_arrive_late_are_in_the_stored_block(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        block, unread = NumberBlock.first_of(CLONE), set[int]()

        async def arrive(number: int) -> NumberBlock:
            await block.reserve(FIRST + number, store, block_name("s", CLONE), lambda: unread)
            unread.add(FIRST + number)
            stored = (await stored_blocks(store)).get("s", {}).get(CLONE) or NumberBlock.first_of(CLONE)
            assert all(stored.has(one) for one in unread)
            assert (stored.low, stored.high) == (block.low, block.high)
            return stored

        assert not (await arrive(BLOCK - 1)).is_stored
        unread.clear()  # all were read and forgotten
        assert (await arrive(BLOCK)).low == FIRST
        unread.clear()
        at = 5 * BLOCK
        ahead = await arrive(at)
        assert all(ahead.has(FIRST + at - n) for n in range(BLOCK))
        late = await arrive(at - 2 * BLOCK)  # further behind than what is written ahead
        assert late.high == ahead.high
        await arrive(0)

    with Store.open(f"sqlite:///{tmp_path}/palestra.db") as store:
        asyncio.run(work(store))
