"""First turns of a group: rollouts that begin with the same prompt are sampled by one request, if they are short.

A request costs a client milliseconds, whatever it asks for: more than a GPU needs for all tokens of a short answer. Its
samples arrive together, so that long ones would wait for the longest. A group's seeds are those of one request's
samples (`group_seeds`): nobody gets other tokens by sharing.
Owns: who waits for whom, which sequence is whose. Never touches: later turns, which have prompts of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from palestra.training.policy import PolicySampler, SamplingError
from palestra.types import SampledSequence, SamplingParams
from palestra.types.rollouts import GroupRequest
from palestra.types.sampling import sample_seed

MOST_TOKENS = 256
"""Turns that may be longer are sampled each by a request of its own."""


@dataclass(slots=True)
class SharedRequest:
    """One request for rollouts that have its prompt and whose seeds are those of its samples."""

    prompt: tuple[int, ...]
    params: SamplingParams
    count: int = 1
    answer: asyncio.Task[list[SampledSequence]] | None = None

    def takes(self, params: SamplingParams) -> bool:
        seed = self.params.seed
        return seed is not None and params.seed == sample_seed(seed, self.count)


class FirstTurns:
    """The first turns of some rollouts of a group. Each rollout joins with its prompt, or leaves; all leave at the
    end."""

    def __init__(self, sampler: PolicySampler, indices: Iterable[int]) -> None:
        self._sampler = sampler
        self._playing = set(indices)
        self._awaited = set(self._playing)
        self._joined: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self._ready = asyncio.Event()
        self._places: dict[int, tuple[SharedRequest, int]] = {}

    async def join(self, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        """Returns when all have joined or left; at once, if nothing will be shared."""
        if params.max_tokens is None or params.max_tokens > MOST_TOKENS:
            self._places[index] = SharedRequest(tuple(prompt), params), 0
            self._not_awaited(index)
            return
        self._joined[index] = tuple(prompt), params
        self._not_awaited(index)
        await self._ready.wait()

    def leave(self, index: int) -> None:
        self._playing.discard(index)
        self._not_awaited(index)
        if not self._playing:
            for request, _ in self._places.values():
                if request.answer is not None:
                    request.answer.cancel()

    async def sample(self, index: int) -> list[SampledSequence]:
        """Returns the sequence of a rollout. Raises SamplingError, like for all that share its request."""
        request, place = self._places[index]
        if request.answer is None:
            sampling = self._sampler.sample(request.prompt, request.params, request.count)
            request.answer = asyncio.create_task(sampling)
        sequences = await asyncio.shield(request.answer)  # one that is cancelled leaves the others theirs
        if len(sequences) != request.count:
            raise SamplingError(f"{request.count} sequences were requested, but {len(sequences)} came")
        return [sequences[place]]

    def _not_awaited(self, index: int) -> None:
        self._awaited.discard(index)
        if not self._awaited and not self._ready.is_set():
            self._plan()
            self._ready.set()

    def _plan(self) -> None:
        latest: dict[tuple[int, ...], SharedRequest] = {}
        for index, (prompt, params) in sorted(self._joined.items()):
            request = latest.get(prompt)
            if request is not None and request.takes(params):
                request.count += 1
            else:
                request = latest[prompt] = SharedRequest(prompt, params)
            self._places[index] = request, request.count - 1


class FirstTurnsOfGroups:
    """Those of many groups. Only as many rollouts wait for each other as may be played at once."""

    def __init__(self, requests: Iterable[GroupRequest], sampler: PolicySampler, concurrency: int) -> None:
        self._of: dict[tuple[str, int], FirstTurns] = {}
        for request in requests:
            everyone = range(len(request.seeds))
            for start in everyone[::concurrency]:
                part = everyone[start : start + concurrency]
                turns = FirstTurns(sampler, part)
                self._of |= {(request.id, index): turns for index in part}

    def of(self, request: GroupRequest, index: int) -> FirstTurns:
        return self._of[request.id, index]
