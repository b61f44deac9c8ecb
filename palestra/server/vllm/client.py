"""A client for one vLLM server: completions, adapters, health.

It uses aiohttp and not httpx, unlike most of Palestra: with hundreds of calls in flight httpx takes ten to thirty times
the CPU for each (`benchmarks/http_clients.py`), and this CPU would be the server's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import aiohttp
import msgspec

from palestra.server.replicas.errors import ReplicaBusy, ReplicaError, ReplicaLost, ReplicaRefused, UnknownAdapter
from palestra.server.vllm.responses import COMPLETION, VllmCompletion
from palestra.util.json_types import JsonObject

T = TypeVar("T")

CONNECT_S = 10.0
SHORT_S = 30.0  # for everything that computes nothing
LOAD_S = 600.0  # an adapter may come over a slow line, and waits for the running step
LINE_BYTES = 1 << 22  # of a stream
DATA = b"data:"
QUEUED = "vllm:num_requests_waiting{"  # in its metrics; one line for each of its engines


class ServedModel(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    """The base model of an adapter."""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel]


class _Paths(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


_MODELS, _PATHS = msgspec.json.Decoder(_Models), msgspec.json.Decoder(_Paths)


class VllmClient:
    def __init__(self, url: str, api_key: str | None, *, request_s: float):
        self.url, self._request_s = url.rstrip("/"), request_s
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes the connections; running requests break off, which vLLM notices."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Sampling

    async def complete(self, body: JsonObject) -> VllmCompletion:
        async with self._call("POST", "/v1/completions", body, self._request_s) as response:
            answer = await response.read()
        return _decoded(answer, COMPLETION)

    async def stream(self, body: JsonObject) -> AsyncGenerator[VllmCompletion, None]:
        async with self._call("POST", "/v1/completions", body, self._request_s) as response:
            async for line in response.content:
                if line.startswith(DATA):
                    data = line[len(DATA) :].strip()
                    if data == b"[DONE]":
                        return
                    yield _decoded(data, COMPLETION)
        raise ReplicaLost(f"{self.url}: the stream ended too early")

    # Adapters

    async def load(self, name: str) -> None:
        """Loads an adapter: vLLM does so at the first request that names it, by the resolver `palestra_lora`."""
        body: JsonObject = {"model": name, "prompt": [1], "max_tokens": 1, "temperature": 0.0}
        await self._read("POST", "/v1/completions", body, LOAD_S)

    async def unload(self, name: str) -> None:
        try:
            await self._read("POST", "/v1/unload_lora_adapter", {"lora_name": name}, SHORT_S)
        except UnknownAdapter:
            pass

    # Information

    async def is_healthy(self) -> bool:
        try:
            await self._read("GET", "/health", None, SHORT_S)
        except ReplicaError:
            return False
        return True

    async def queued(self) -> int:
        """Returns the number of requests that wait in it; 0 if it does not say."""
        try:
            metrics = (await self._read("GET", "/metrics", None, SHORT_S)).decode(errors="replace")
            lines = [line for line in metrics.splitlines() if line.startswith(QUEUED)]
            return int(sum(float(line.rpartition(" ")[2]) for line in lines))
        except (ReplicaError, ValueError):
            return 0

    async def models(self) -> list[ServedModel]:
        return _decoded(await self._read("GET", "/v1/models", None, SHORT_S), _MODELS).data

    async def routes(self) -> set[str]:
        return set(_decoded(await self._read("GET", "/openapi.json", None, SHORT_S), _PATHS).paths)

    async def _read(self, method: str, path: str, body: JsonObject | None, timeout_s: float) -> bytes:
        async with self._call(method, path, body, timeout_s) as response:
            return await response.read()

    @asynccontextmanager
    async def _call(
        self, method: str, path: str, body: JsonObject | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), headers=self._headers, read_bufsize=LINE_BYTES
            )
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(method, self.url + path, data=data, timeout=limits) as response:
                if response.status != 200:
                    raise _error(self.url, response.status, await response.read())
                yield response
        except TimeoutError:
            raise ReplicaLost(f"{self.url} did not answer within {timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise ReplicaLost(f"{self.url} does not answer ({str(e) or type(e).__name__})") from None


def _decoded(data: bytes, as_: msgspec.json.Decoder[T]) -> T:
    try:
        return as_.decode(data)
    except msgspec.MsgspecError as e:
        raise ReplicaLost(f"vLLM's answer is malformed: {e}") from None


def _error(url: str, status: int, answer: bytes) -> ReplicaError:
    try:
        error = COMPLETION.decode(answer).error
    except msgspec.MsgspecError:
        error = None
    text = error.message if error is not None else answer.decode(errors="replace")[:500]
    message = " ".join(text.split()) or f"status {status}"
    match status:
        case 400 | 413 | 422:
            return ReplicaRefused(message)
        case 401 | 403:
            return ReplicaLost(f"{url} refuses the API key ({status}); set VLLM_API_KEY or vllm.api_key")
        case 404:
            return UnknownAdapter(message)
        case 429 | 503:
            return ReplicaBusy(f"{url}: {message}")
        case _:
            return ReplicaLost(f"{url}: {message}")
