"""The newest weights of a run, whichever these are: rollouts that outlive their weights sample from it."""

from __future__ import annotations

from collections.abc import Sequence

from palestra.rollouts.policy_sampler import PolicySampler, TopScores
from palestra.types import SampledSequence, SamplingParams
from palestra.types.pictures import PromptPicture


class FollowingSampler:
    """Each request is of the weights that are `newest` when it is made."""

    def __init__(self, newest: PolicySampler) -> None:
        self.newest = newest

    @property
    def version(self) -> int:
        return self.newest.version

    @property
    def model(self) -> str:
        return self.newest.model

    async def sample(
        self, prompt: Sequence[int], params: SamplingParams, count: int = 1, pictures: Sequence[PromptPicture] = ()
    ) -> list[SampledSequence]:
        return await self.newest.sample(prompt, params, count, pictures)

    async def base_model(self) -> str:
        return await self.newest.base_model()

    async def score(self, tokens: Sequence[int], pictures: Sequence[PromptPicture] = ()) -> list[float]:
        return await self.newest.score(tokens, pictures)

    async def score_top(self, tokens: Sequence[int], k: int, pictures: Sequence[PromptPicture] = ()) -> TopScores:
        return await self.newest.score_top(tokens, k, pictures)
