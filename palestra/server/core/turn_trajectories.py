"""Stored model calls as trajectories for training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from palestra.chat.trajectories import ModelCall, SampledTokens, Trajectory, trajectories
from palestra.store.queries.traces import TraceTurn
from palestra.types.pictures import PlacedImage


@dataclass(frozen=True, slots=True)
class SeenTrajectory:
    trajectory: Trajectory
    images: list[PlacedImage]
    """Where pictures stand among its tokens."""

    def rows(self, place: int) -> int:
        """Positions of a picture, by its place among them: equal tokens up to another one or to the next picture."""
        start, tokens = self.images[place].start, self.trajectory.tokens
        end = self.images[place + 1].start if place + 1 < len(self.images) else len(tokens)
        return next((at for at in range(start, end) if tokens[at] != tokens[start]), end) - start


def trajectories_of(turns: Iterable[TraceTurn]) -> list[SeenTrajectory]:
    """Joins calls by their tokens, and by the pictures among them: all pictures of one size have the same tokens."""
    named = _NamedPictures()
    calls = []
    for turn in turns:
        samples = [SampledTokens(tokens=one.tokens, logprobs=one.logprobs) for one in turn.samples]
        calls.append(ModelCall(prompt=named.put(turn.prompt, turn.facts.images), samples=samples))
    return [named.taken(one) for one in trajectories(calls)]


@dataclass(slots=True)
class _NamedPictures:
    """Negative numbers in place of pictures' first tokens, one for each picture."""

    names: dict[tuple[str, int], int] = field(default_factory=dict)
    """By digest and first token."""

    def put(self, prompt: Sequence[int], images: Sequence[PlacedImage]) -> Sequence[int]:
        if not images:
            return prompt
        tokens = list(prompt)
        for image in images:
            tokens[image.start] = self.names.setdefault((image.digest, tokens[image.start]), -1 - len(self.names))
        return tokens

    def taken(self, trajectory: Trajectory) -> SeenTrajectory:
        if not self.names:
            return SeenTrajectory(trajectory, [])
        pictures, tokens = {name: key for key, name in self.names.items()}, list(trajectory.tokens)
        images = []
        for place, token in enumerate(trajectory.tokens):
            if token in pictures:
                digest, tokens[place] = pictures[token]
                images.append(PlacedImage(place, digest))
        return SeenTrajectory(replace(trajectory, tokens=tokens), images)
