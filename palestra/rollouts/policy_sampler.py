"""The policy as those who play see it: weights that can be sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from palestra.types import SampledSequence, SamplingParams
from palestra.types.pictures import PromptPicture
from palestra.types.sampling import TopLogprobs


class PolicyError(Exception):
    """The engine refused a request or is gone: the run ends, and can be resumed."""


class ServerUnreachable(PolicyError, ConnectionError):
    """Nothing answers at the server's address."""


class SamplingError(Exception):
    """One request could not be answered, and repeating it at once will not help."""


class TopScores(NamedTuple):
    """What a model says about a row of tokens."""

    logprobs: list[float]
    """One for each token; that of the first is 0."""
    top: list[TopLogprobs | None]
    """The likeliest tokens in its place; None for the first."""


def top_of(pairs: Iterable[tuple[int, float]]) -> TopLogprobs:
    """Makes a record of pairs of a token and its logprob."""
    ordered = sorted(pairs, key=lambda pair: -pair[1])
    return TopLogprobs(tuple(token for token, _ in ordered), tuple(logprob for _, logprob in ordered))


class PolicySampler(Protocol):
    """Weights that do not change any more, to sample from."""

    @property
    def version(self) -> int: ...

    @property
    def model(self) -> str:
        """The name of these weights at the server's model endpoint."""
        ...

    async def sample(
        self, prompt: Sequence[int], params: SamplingParams, count: int = 1, pictures: Sequence[PromptPicture] = ()
    ) -> list[SampledSequence]:
        """Samples `count` sequences. `pictures`: those of the prompt. Raises SamplingError."""
        ...

    async def base_model(self) -> str:
        """Returns the server's name of the model that these weights belong to. Raises PolicyError."""
        ...

    async def score(self, tokens: Sequence[int], pictures: Sequence[PromptPicture] = ()) -> list[float]:
        """Returns the logprob of each token; the first one and those of pictures get 0. Raises SamplingError."""
        ...

    async def score_top(self, tokens: Sequence[int], k: int, pictures: Sequence[PromptPicture] = ()) -> TopScores:
        """Returns that and the `k` likeliest tokens in the place of each. Raises SamplingError."""
        ...
