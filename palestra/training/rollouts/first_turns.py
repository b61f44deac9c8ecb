"""First turns of a group: rollouts that begin with the same prompt are sampled by one request.

A request costs a client milliseconds, whatever it asks for: more than a GPU needs for all tokens of a short answer. A
group's seeds are those of one request's samples (`group_seeds`), so nobody gets other tokens by sharing.
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
        self._joined: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
        self._ready = asyncio.Event()
        self._places: dict[int, tuple[SharedRequest, int]] = {}

    async def join(self, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        """Returns when all have joined or left."""
        self._joined[index] = tuple(prompt), params
        self._open_if_all_are_here()
        await self._ready.wait()

    def leave(self, index: int) -> None:
        self._playing.discard(index)
        self._open_if_all_are_here()
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

    def _open_if_all_are_here(self) -> None:
        if self._playing <= self._joined.keys() and not self._ready.is_set():
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
