"""A client for servers that speak OpenAI's APIs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import ClientResponse
from pydantic import BaseModel, Field

from nemo_gym.calls import MAX_NUM_TRIES, get_response_json, raise_for_status, request
from nemo_gym.json_types import JsonObject

log = logging.getLogger(__name__)

RATE_LIMIT_ERROR_CODES = [429, 502, 503, 504, 520]
RETRY_ERROR_CODES = [*RATE_LIMIT_ERROR_CODES, 500]
BUSY_TRIES = 60  # with pauses that grow to 10 s: about nine minutes for a server that says it is busy
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0


class NeMoGymAsyncOpenAI(BaseModel):
    base_url: str
    api_key: str
    internal: bool = False
    default_headers: dict[str, str] = Field(default_factory=dict)
    max_http_attempts: int = Field(default=MAX_NUM_TRIES, ge=1)
    """How often an upstream that answers 500 is asked; one that says it is busy has its own patience."""
    max_connection_retries: int | None = None
    """Nothing to us: a server that is away has `peer_reconnect_s`."""

    async def create_models(self) -> object:
        return await self._call("GET", f"{self.base_url}/models")

    async def create_chat_completion(self, **kwargs: object) -> object:
        return await self._call("POST", f"{self.base_url}/chat/completions", kwargs)

    async def create_completion(self, **kwargs: object) -> object:
        return await self._call("POST", f"{self.base_url}/completions", kwargs)

    async def create_response(self, **kwargs: object) -> object:
        return await self._call("POST", f"{self.base_url}/responses", kwargs)

    async def create_tokenize(self, **kwargs: object) -> object:
        return await self._call("POST", f"{self.base_url.removesuffix('/v1')}/tokenize", kwargs)

    async def _call(self, method: str, url: str, body: JsonObject | None = None) -> object:
        """Raises ClientResponseError with the last answer, where none was good."""
        failed = busy = 0
        pause_s = FIRST_PAUSE_S
        while True:
            response = await self._request(method=method, url=url, **({} if body is None else {"json": body}))
            if response.status not in RETRY_ERROR_CODES:
                break
            is_busy = response.status in RATE_LIMIT_ERROR_CODES
            busy, failed = busy + is_busy, failed + (not is_busy)
            if busy >= BUSY_TRIES or failed >= self.max_http_attempts:
                break
            log.warning("%s answered %d, trying again in %g s", url, response.status, pause_s)
            response.release()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        await raise_for_status(response)
        return await get_response_json(response)

    async def _request(self, **request_kwargs: Any) -> ClientResponse:
        headers = {**self.default_headers, "Authorization": f"Bearer {self.api_key}"}
        return await request(**request_kwargs, headers=headers, _internal=self.internal)
