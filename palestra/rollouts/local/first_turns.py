"""First turns of a group: rollouts that begin with the same prompt are sampled by one request, if they are short.

A request costs a client milliseconds, whatever it asks for: more than a GPU needs for all tokens of a short answer. Its
samples arrive together, so that long ones would wait for the longest. A group's seeds are those of one request's
samples (`group_seeds`): with Palestra's own sampler sharing changes no tokens, whichever rollouts come in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from palestra.rollouts.policy_sampler import PolicySampler, SamplingError
from palestra.types import SampledSequence, SamplingParams
from palestra.types.pictures import PromptPicture
from palestra.types.rollouts import GroupRequest
from palestra.types.sampling import sample_seed

MOST_TOKENS = 256
"""Turns that may be longer are sampled each by a request of its own."""
PATIENCE_S = 0.1
"""Rollouts wait no longer for the rest of their group: these may need what a waiting one holds, such as one of few
containers."""


@dataclass(slots=True)
class FirstRequest:
    """One request, for rollouts that have its prompt and whose seeds are those of its samples."""

    prompt: tuple[int, ...]
    pictures: tuple[PromptPicture, ...]
    params: SamplingParams
    indices: list[int]
    """The rollouts, in the order of their samples."""
    left: set[int] = field(default_factory=set)
    answer: asyncio.Task[list[SampledSequence]] | None = None

    def takes(self, params: SamplingParams) -> bool:
        seed = self.params.seed
        return seed is not None and params.seed == sample_seed(seed, len(self.indices))

    async def sample(self, sampler: PolicySampler, index: int) -> list[SampledSequence]:
        if len(self.indices) == 1:
            return await sampler.sample(self.prompt, self.params, pictures=self.pictures)
        if self.answer is None:
            self.answer = asyncio.create_task(
                sampler.sample(self.prompt, self.params, len(self.indices), pictures=self.pictures)
            )
        sequences = await asyncio.shield(self.answer)  # one that is cancelled leaves the others theirs
        if len(sequences) != len(self.indices):
            raise SamplingError(f"{len(self.indices)} sequences were requested, but {len(sequences)} came")
        return [sequences[self.indices.index(index)]]

    def leave(self, index: int) -> None:
        self.left.add(index)
        if self.answer is not None and self.left.issuperset(self.indices):
            self.answer.cancel()


class JoinedPrompt(NamedTuple):
    """The prompt with which a rollout begins."""

    prompt: tuple[int, ...]
    pictures: tuple[PromptPicture, ...]
    params: SamplingParams

    @property
    def key(self) -> Hashable:
        """Equal for equal prompts: those with other pictures have the same tokens."""
        return self.prompt, tuple(one.file.digest for one in self.pictures)

    def request(self, index: int) -> FirstRequest:
        return FirstRequest(self.prompt, self.pictures, self.params, [index])


class FirstTurns:
    """The first turns of a group's rollouts. Each rollout joins with its prompt, and leaves at its end, whether it has
    joined or not."""

    def __init__(self, sampler: PolicySampler, indices: Iterable[int]) -> None:
        self.sampler = sampler
        self._awaited = set(indices)
        self._joined: dict[int, JoinedPrompt] = {}
        self._ready = asyncio.Event()
        self._requests: dict[int, FirstRequest] = {}

    async def join(
        self, index: int, prompt: Sequence[int], params: SamplingParams, pictures: Sequence[PromptPicture] = ()
    ) -> None:
        """Waits a moment for those that have neither joined nor left."""
        own = JoinedPrompt(tuple(prompt), tuple(pictures), params)
        if self._ready.is_set() or params.max_tokens is None or params.max_tokens > MOST_TOKENS:
            self._requests[index] = own.request(index)
            self._stop_waiting_for(index)
            return
        if not self._joined:
            asyncio.get_running_loop().call_later(PATIENCE_S, self._open)
        self._joined[index] = own
        self._stop_waiting_for(index)
        await self._ready.wait()

    async def sample(self, index: int) -> list[SampledSequence]:
        """Returns the sequence of a rollout. Raises SamplingError, as for all that share its request."""
        return await self._requests[index].sample(self.sampler, index)

    def leave(self, index: int) -> None:
        self._joined.pop(index, None)
        self._stop_waiting_for(index)
        if request := self._requests.pop(index, None):
            request.leave(index)

    def _stop_waiting_for(self, index: int) -> None:
        self._awaited.discard(index)
        if not self._awaited:
            self._open()

    def _open(self) -> None:
        if self._ready.is_set():
            return
        latest: dict[Hashable, FirstRequest] = {}
        for index, own in sorted(self._joined.items()):
            request = latest.get(own.key)
            if request is not None and request.takes(own.params):
                request.indices.append(index)
            else:
                request = latest[own.key] = own.request(index)
            self._requests[index] = request
        self._joined.clear()
        self._ready.set()


class FirstTurnsOfGroups:
    """The first turns of many groups."""

    def __init__(self, requests: Iterable[GroupRequest], sampler: PolicySampler) -> None:
        self._turns = {
            (request.id, request.task.environment): FirstTurns(sampler, range(len(request.seeds)))
            for request in requests
        }

    def of(self, request: GroupRequest) -> FirstTurns:
        return self._turns[request.id, request.task.environment]
