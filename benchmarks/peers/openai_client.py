"""Requests of the benchmark of the model endpoint: plain HTTP, the same for every server."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

TIMEOUT_S = 600


@dataclass(slots=True)
class Heard:
    """One answer, as its reader saw it."""

    tokens: int = 0
    first_s: float = 0.0
    """From the request to its first token."""
    took_s: float = 0.0


@dataclass(slots=True)
class OpenAIClient:
    url: str
    model: str = ""
    vocabulary: int = 500
    _numbers: random.Random = field(default_factory=lambda: random.Random(0))

    def prepare(self) -> None:
        """Asks for the name of the model there is."""

        async def ask(session: aiohttp.ClientSession) -> str:
            async with session.get("/v1/models") as answer:
                return (await answer.json())["data"][0]["id"]

        self.model = asyncio.run(self._with_session(ask))

    def complete(self, requests: int, tokens_in: int, tokens_out: int, *, stream: bool = False) -> list[Heard]:
        """All at once."""
        bodies = [self._completion(tokens_in, tokens_out, stream=stream) for _ in range(requests)]

        async def ask(session: aiohttp.ClientSession) -> list[Heard]:
            return await asyncio.gather(*(_post(session, "/v1/completions", body) for body in bodies))

        answers = asyncio.run(self._with_session(ask))
        for answer in answers:
            if answer.tokens != tokens_out:
                raise RuntimeError(f"{tokens_out} tokens were asked for, {answer.tokens} came")
        return answers

    def converse(self, turns: int, tokens_out: int) -> list[float]:
        """Seconds of each turn of one conversation: the history grows, what is new does not."""

        async def talk(session: aiohttp.ClientSession) -> list[float]:
            messages: list[dict[str, str]] = [{"role": "user", "content": self._text()}]
            took: list[float] = []
            for _ in range(turns):
                body = {"model": self.model, "messages": messages, "max_tokens": tokens_out, "temperature": 0}
                start = time.perf_counter()
                async with session.post("/v1/chat/completions", json=body | {"ignore_eos": True}) as answer:
                    reply = await answer.json()
                took.append(time.perf_counter() - start)
                if answer.status != 200:
                    raise RuntimeError(f"{answer.status}: {reply}")
                content = reply["choices"][0]["message"]["content"] or ""
                messages += [
                    {"role": "assistant", "content": content},
                    {"role": "user", "content": self._text()},
                ]
            return took

        return asyncio.run(self._with_session(talk))

    def close(self) -> None:
        """Nothing is held between calls."""

    def _completion(self, tokens_in: int, tokens_out: int, *, stream: bool) -> dict[str, Any]:
        """Random ids: nothing is in a prefix cache."""
        return {
            "model": self.model,
            "prompt": [self._numbers.randrange(3, self.vocabulary) for _ in range(tokens_in)],
            "max_tokens": tokens_out,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": stream,
        } | ({"stream_options": {"include_usage": True}} if stream else {})

    def _text(self) -> str:
        return " ".join(self._numbers.choices(("river", "stone", "lamp", "seven", "north", "paper"), k=12))

    async def _with_session(self, work: Any) -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(self.url, connector=connector, timeout=timeout) as session:
            return await work(session)


async def _post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Heard:
    heard, start = Heard(), time.perf_counter()
    async with session.post(path, json=body) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {(await answer.text())[:300]}")
        if body["stream"]:
            await _listen(answer, heard, start)
        else:
            heard.tokens = (await answer.json())["usage"]["completion_tokens"]
    heard.took_s = time.perf_counter() - start
    return heard


async def _listen(answer: aiohttp.ClientResponse, heard: Heard, start: float) -> None:
    async for line in answer.content:
        if not line.startswith(b"data: {"):
            continue
        reply = json.loads(line[6:])
        if "error" in reply:
            raise RuntimeError(reply["error"])
        if not heard.first_s and any(choice.get("text") for choice in reply["choices"]):
            heard.first_s = time.perf_counter() - start
        if reply.get("usage"):
            heard.tokens = reply["usage"]["completion_tokens"]
