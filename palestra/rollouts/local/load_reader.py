"""Reads how full the engine of a server of ours is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import msgspec

from palestra.config.api_key import api_key
from palestra.rollouts.local.following_limit import ReadLoad, SamplingLoad

TIMEOUT_S = 10.0


@asynccontextmanager
async def open_load_reader(url: str | None, base_model: str) -> AsyncIterator[ReadLoad]:
    """`url`: None means hosted Tinker, which says nothing about its load; neither do other servers."""
    async with httpx.AsyncClient(base_url=url or "", headers={"x-api-key": api_key()}, timeout=TIMEOUT_S) as http:

        async def read() -> SamplingLoad | None:
            if url is None:
                return None
            try:
                answer = await http.get("/api/v1/sampling_load", params={"base_model": base_model})
                return msgspec.json.decode(answer.content, type=SamplingLoad) if answer.is_success else None
            except (httpx.HTTPError, msgspec.MsgspecError):
                return None  # asked again in a second

        yield read
