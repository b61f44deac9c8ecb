"""A teacher behind an OpenAI-compatible endpoint that returns log-probabilities of prompts, as vLLM and Palestra do."""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from msgspec import Struct

from palestra.config.distillation import DistillationConfig, TeacherConfig
from palestra.net.json_calls import CallFailure, post_json
from palestra.rollouts.policy_sampler import SamplingError, TopScores, top_of
from palestra.types.pictures import PromptPicture
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

    async def score(self, tokens: Sequence[int], pictures: Sequence[PromptPicture] = ()) -> list[float]:
        self._refuse(pictures)
        return [0.0, *(token.logprob for token in await self.read(tokens))]

    async def score_top(self, tokens: Sequence[int], k: int, pictures: Sequence[PromptPicture] = ()) -> TopScores:
        self._refuse(pictures)
        answer = await self._post(tokens, k)
        scores = self._scores(answer, tokens)
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        try:
            pairs_N = [[(int(token), float(one["logprob"])) for token, one in row.items()] for row in rows]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self._refusal() from None
        if any(len(pairs) < k for pairs in pairs_N):
            fewest = min(map(len, pairs_N))
            raise SamplingError(
                f"teacher {self._model}: {self._http.base_url} returns {fewest} tokens for each place, not {k}; "
                f"set distillation.top_k={fewest}"
            )
        best_N = (heapq.nlargest(k, pairs, key=lambda pair: pair[1]) for pairs in pairs_N)
        return TopScores([0.0, *(one.logprob for one in scores)], [None, *map(top_of, best_N)])

    async def read(self, tokens: Sequence[int]) -> list[TeacherScore]:
        """Returns what the endpoint says about each token but the first. Raises SamplingError."""
        return self._scores(await self._post(tokens, 0), tokens)

    async def _post(self, tokens: Sequence[int], k: int) -> JsonObject:
        body = {"model": self._model, "prompt": list(tokens), "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
        async with self._slots:
            try:
                return await post_json(self._http, "completions", body, patience_s=self._patience_s)
            except CallFailure as error:
                raise SamplingError(f"teacher {self._model}: {error}") from None

    def _scores(self, answer: JsonObject, tokens: Sequence[int]) -> list[TeacherScore]:
        try:
            rows = answer["choices"][0]["prompt_logprobs"]
            found = [row[str(token)] for row, token in zip(rows[1:], tokens[1:], strict=True)]
            return [TeacherScore(float(one["logprob"]), one.get("decoded_token")) for one in found]
        except (KeyError, IndexError, TypeError, ValueError):
            raise self._refusal() from None

    def _refuse(self, pictures: Sequence[PromptPicture]) -> None:
        if pictures:
            raise SamplingError(
                f"teacher {self._model}: a rollout has pictures, which a teacher behind an endpoint cannot read; name "
                "a model or a run (teachers[].model)"
            )

    def _refusal(self) -> SamplingError:
        return SamplingError(
            f"teacher {self._model}: {self._http.base_url} returns no prompt_logprobs of these tokens; "
            "vLLM's and Palestra's completions do"
        )
