"""Weights behind a Tinker API, to sample from: our server's, or any other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import tinker
from tinker import types

from palestra.rollouts.continued_samples import ContinuedSamples
from palestra.rollouts.policy_sampler import PolicyError, SamplingError, TopScores, top_of
from palestra.types import SampledSequence, SamplingParams, StopReason
from palestra.types.pictures import PromptPicture, origin_in
from palestra.types.sampling import VersionSegment
from palestra.util.tinker_deprecations import ignore_deprecations

ignore_deprecations()


@contextmanager
def translated(kind: type[Exception], what: str, pictures: Iterable[PromptPicture] = ()) -> Iterator[None]:
    """`pictures`: those of the request; a message about one says where it stands."""
    try:
        yield
    except tinker.TinkerError as error:
        origin = origin_in(str(error), pictures)
        raise kind(f"{what}: {origin + ': ' if origin else ''}{error}") from error


class TinkerSampler:
    def __init__(self, client: tinker.SamplingClient, version: int, continued: ContinuedSamples | None = None) -> None:
        """`continued`: where its samples may go on with newer weights."""
        self._client, self.version, self._continued = client, version, continued
        if continued is not None:
            continued.add(self.model, version)

    @property
    def model(self) -> str:
        return self._client._sampling_session_id  # the SDK (0.36) offers the id nowhere else

    async def sample(
        self, prompt: Sequence[int], params: SamplingParams, count: int = 1, pictures: Sequence[PromptPicture] = ()
    ) -> list[SampledSequence]:
        params_out = types.SamplingParams(
            max_tokens=params.max_tokens,
            seed=params.seed,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            stop=list(params.stop_token_ids) if params.stop_token_ids is not None else None,
        )
        with translated(SamplingError, "sampling failed", pictures):
            answer = await self._client.sample_async(model_input(prompt, pictures), count, params_out)
        sequences = [
            SampledSequence(
                tokens=list(one.tokens),
                logprobs=list(one.logprobs or []),
                stop_reason=StopReason(one.stop_reason),
                sequence_id=one.sequence_id,
                segments=[VersionSegment(0, self.version)],
            )
            for one in answer.sequences
        ]
        if self._continued is not None:
            names = [one.sequence_id for one in sequences]
            found = await self._continued.segments(self.model, self.version, names)
            for sequence, segments in zip(sequences, found, strict=True):
                sequence.segments = segments
        return sequences

    async def base_model(self) -> str:
        """Returns the server's name of the model that these weights belong to."""
        with translated(PolicyError, "the server does not say which model it samples"):
            return await self._client.get_base_model_async()

    async def score_top(self, tokens: Sequence[int], k: int, pictures: Sequence[PromptPicture] = ()) -> TopScores:
        """Returns the logprob of each token, as `score` does, and the k likeliest tokens in its place."""
        params, prompt = types.SamplingParams(max_tokens=1), model_input(tokens, pictures)
        with translated(SamplingError, "scoring failed", pictures):
            answer = await self._client.sample_async(
                prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=k
            )
        top = [None if row is None else top_of(row) for row in answer.topk_prompt_logprobs or []]
        return TopScores([one or 0.0 for one in answer.prompt_logprobs or []], top)

    async def score(self, tokens: Sequence[int], pictures: Sequence[PromptPicture] = ()) -> list[float]:
        with translated(SamplingError, "scoring failed", pictures):
            scores = await self._client.compute_logprobs_async(model_input(tokens, pictures))
        return [score or 0.0 for score in scores]


def model_input(tokens: Sequence[int], pictures: Sequence[PromptPicture] = ()) -> types.ModelInput:
    """The tokens, with the files of pictures in the places that they take."""
    if not pictures:
        return types.ModelInput.from_ints(list(tokens))
    chunks: list[types.ModelInputChunk] = []
    at = 0
    for picture in [*pictures, None]:
        text = list(tokens[at : None if picture is None else picture.start])
        if text:
            chunks.append(types.EncodedTextChunk(tokens=text))
        if picture is not None:
            # The API names two formats; servers read files by their content.
            form = "jpeg" if picture.file.media_type == "image/jpeg" else "png"
            chunks.append(types.ImageChunk(data=picture.file.data, format=form, expected_tokens=picture.rows))
            at = picture.end
    return types.ModelInput(chunks=chunks)
