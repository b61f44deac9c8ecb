"""Masking beside the server: whatever a pattern does, others are served, and what it did not look at is not shown."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable

import pytest

from palestra.config.redaction import REDACTED
from palestra.server.broker.mask_child import TOO_LONG
from palestra.server.broker.masking import CHILD, SHORT_BYTES, Masking
from palestra.server.core.errors import Refusal

SLOW = r"(a+)+b"  # twice the time for each further a
ENDLESS = "a" * 64


def masked(patterns: list[str], work: Callable[[Masking], Awaitable[None]], limit_s: float = 60.0) -> None:
    async def run() -> None:
        masking = Masking(patterns, limit_s)
        try:
            await work(masking)
        finally:
            await masking.close()

    asyncio.run(run())


def test_a_pattern_that_takes_for_ever_holds_up_nobody_and_shows_nothing() -> None:
    async def work(masking: Masking) -> None:
        request = asyncio.create_task(masking.of([{"first": "xaab", "second": ENDLESS, "third": "tml-0123456789"}]))
        turns = 0
        while not request.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert turns > 1
        assert await request == [{"first": f"x{REDACTED}", "second": TOO_LONG, TOO_LONG: TOO_LONG}]
        assert await masking.of(["xaab"]) == [f"x{REDACTED}"]  # the next one has its own time

    masked([SLOW], work, limit_s=0.3)


def test_whoever_leaves_in_the_middle_leaves_no_answer_behind() -> None:
    async def work(masking: Masking) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(masking.of([ENDLESS]), 0.5)
        assert await masking.of(["xaab"]) == [f"x{REDACTED}"]

    masked([SLOW], work)


def test_a_process_that_dies_is_told_and_followed_by_another() -> None:
    async def work(masking: Masking) -> None:
        request = asyncio.create_task(masking.of([ENDLESS]))
        while not (found := await asyncio.to_thread(children)):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)
        os.kill(found[0], signal.SIGKILL)
        with pytest.raises(Refusal, match="send the request again") as refused:
            await request
        assert refused.value.status == 503
        assert await masking.of(["xaab"]) == [f"x{REDACTED}"]

    masked([SLOW], work)


def test_long_texts_are_masked_beside_the_server_and_short_ones_here() -> None:
    async def work(masking: Masking) -> None:
        assert await masking.of(["tml-0123456789"]) == [REDACTED]
        assert children() == []
        assert await masking.of(["x" * SHORT_BYTES, "tml-0123456789"]) == ["x" * SHORT_BYTES, REDACTED]
        assert len(children()) == 1

    masked([], work)
    assert children() == []


def children() -> list[int]:
    """Those of this process that mask."""
    response = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", CHILD], capture_output=True, text=True, check=False
    )
    return [int(line) for line in response.stdout.split()]
