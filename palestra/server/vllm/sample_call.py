"""One sample at one vLLM server, in one request or two, without retries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from palestra.server.replicas.errors import ReplicaLost
from palestra.server.vllm.client import VllmClient
from palestra.server.vllm.params import ServedModelFacts, completion_body, is_scored, scoring_body
from palestra.server.vllm.responses import GrowingSequences, VllmCompletion, VllmPromptScores
from palestra.types import SampleRequest, SampleResult
from palestra.types.engine import Sample, Streamed, StreamedTokens
from palestra.types.sampling import SampledSequence
from palestra.util.json_types import JsonObject

Tell = Callable[[Streamed], None]


async def sample_once(
    client: VllmClient, model: str, sample: Sample, facts: ServedModelFacts, tell: Tell
) -> SampleResult:
    request = sample.request
    scored = is_scored(request)
    # An answer that a second request has to complete, or that vLLM does not stream, is sent in one piece.
    in_parts = sample.stream and not scored and not request.prompt_logprobs
    body = completion_body(request, model, facts, stream=in_parts)
    found = GrowingSequences(
        request.prompt,
        request.num_samples,
        top=0 if scored else request.topk_logprobs,
        prompt_top=request.topk_prompt_logprobs,
    )
    if in_parts:
        await _listen(client, body, sample, found, tell)
    else:
        found.add(await client.complete(body))
    found.check_whole()
    if scored:
        await asyncio.gather(*(_score(client, model, request, row) for row in found.rows))
    elif request.raw_logprobs:
        for row in found.rows:
            row.raw_logprobs = list(row.logprobs)
    if sample.stream and not in_parts:
        tell(Streamed(parts=[_part(sample, i, row, 0) for i, row in enumerate(found.rows)]))
    return _result(request, found)


async def _listen(client: VllmClient, body: JsonObject, sample: Sample, found: GrowingSequences, tell: Tell) -> None:
    async with aclosing(client.stream(body)) as parts:
        async for part in parts:
            before = [len(row.tokens) for row in found.rows]
            found.add(part)
            news = [
                _part(sample, i, row, n)
                for i, (row, n) in enumerate(zip(found.rows, before, strict=True))
                if len(row.tokens) > n
            ]
            if news:
                tell(Streamed(parts=news))


def _part(sample: Sample, index: int, row: SampledSequence, start: int) -> StreamedTokens:
    return StreamedTokens(
        request_id=sample.request_id,
        sample=index,
        tokens=row.tokens[start:],
        logprobs=(row.raw_logprobs or row.logprobs)[start:],
        topk_logprobs=row.topk_logprobs[start:],
    )


async def _score(client: VllmClient, model: str, request: SampleRequest, row: SampledSequence) -> None:
    """Scores the answer by the model itself, at temperature 1, by reading it as a prompt."""
    tokens, count = (*request.prompt, *row.tokens), len(row.tokens)
    answer: VllmCompletion = await client.complete(scoring_body(request, tokens, model))
    prompt_logprobs = answer.choices[0].prompt_logprobs if answer.choices else None
    if prompt_logprobs is None:
        raise ReplicaLost("vLLM did not score a prompt")
    scores = VllmPromptScores.of(prompt_logprobs, tokens, request.topk_logprobs)
    own = [logprob for logprob in scores.logprobs[-count:] if logprob is not None]
    row.topk_logprobs = [top for top in scores.top[-count:] if top is not None] if request.topk_logprobs else []
    if request.params.temperature in (0.0, 1.0):
        row.logprobs = own
    if request.raw_logprobs:
        row.raw_logprobs = list(own)


def _result(request: SampleRequest, found: GrowingSequences) -> SampleResult:
    result = SampleResult(sequences=found.rows, cached_prompt_tokens=found.cached_tokens)
    if not request.prompt_logprobs and not request.topk_prompt_logprobs:
        return result
    if found.prompt is None:
        raise ReplicaLost("vLLM did not score the prompt")
    last_n = request.prompt_logprobs_last_n
    hidden = 0 if last_n is None else max(0, len(request.prompt) - last_n)
    if request.prompt_logprobs:
        result.prompt_logprobs = [None] * hidden + found.prompt.logprobs[hidden:]
    if request.topk_prompt_logprobs:
        result.topk_prompt_logprobs = [None] * hidden + found.prompt.top[hidden:]
    return result
