"""A teacher behind an OpenAI-compatible endpoint that returns log-probabilities of prompts, as vLLM and Palestra do.

Owns: the calls and their retries. Never touches: what the scores are for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from msgspec import Struct

from palestra.config.distillation import DistillationConfig, TeacherConfig
from palestra.net.json_calls import CallFailure, post_json
from palestra.rollouts.policy_sampler import SamplingError
from palestra.util.json_types import JsonObject

CALL_S = 600.0
CONNECT_S = 10.0


class TeacherScore(Struct, frozen=True):
    logprob: float
    text: str | None
    """The token as text, if the endpoint says it."""


class EndpointTeacher:
    def __init__(self, http: httpx.AsyncClient, teacher: TeacherConfig, settings: DistillationConfig) -> None:
        self._http, self._model, self._patience_s = http, teacher.model, settings.patience_s
        self._slots = asyncio.Semaphore(settings.concurrency)

    @classmethod
    @asynccontextmanager
    async def open(cls, teacher: TeacherConfig, settings: DistillationConfig) -> AsyncIterator[EndpointTeacher]:
        headers = {}
        if teacher.key_env is not None:
            if not (key := os.environ.get(teacher.key_env)):
                raise SamplingError(f"teacher {teacher.model}: the environment variable {teacher.key_env} is not set")
            headers = {"Authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(CALL_S, connect=CONNECT_S)
        async with httpx.AsyncClient(base_url=teacher.endpoint or "", headers=headers, timeout=timeout) as http:
            yield cls(http, teacher, settings)

    async def score(self, tokens: Sequence[int]) -> list[float]:
        return [0.0, *(token.logprob for token in await self.read(tokens))]

    async def read(self, tokens: Sequence[int]) -> list[TeacherScore]:
        """Returns what the endpoint says about each token but the first. Raises SamplingError."""
        body = {"model": self._model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        async with self._slots:
            try:
                answer = await post_json(self._http, "completions", body, patience_s=self._patience_s)
            except CallFailure as error:
                raise SamplingError(f"teacher {self._model}: {error}") from None
        return self._scores(answer, tokens)

    def _scores(self, answer: JsonObject, tokens: Sequence[int]) -> list[TeacherScore]:
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            found = [row[str(token)] for row, token in zip(rows[1:], tokens[1:], strict=True)]
            return [TeacherScore(float(one["logprob"]), one.get("decoded_token")) for one in found]
        except (KeyError, IndexError, TypeError, ValueError):
            raise SamplingError(
                f"teacher {self._model}: {self._http.base_url} returns no prompt_logprobs of these tokens; "
                "vLLM's and Palestra's completions do"
            ) from None
