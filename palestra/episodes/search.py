"""Searches episodes by run, state, reward, error, and text of their task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from palestra.episodes.records import BoardEpisode, BoardGroup
from palestra.types.episodes import EpisodeInfo, EpisodeResult, EpisodeState

PART = 1000  # episodes examined in one step: a few milliseconds, while 100,000 may be queued
PART_SIZE = 1 << 22  # characters of tasks and results read in one step: about 10 ms, while each may have a MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeSearch:
    run: str | None = None
    state: EpisodeState | None = None
    reward_min: float | None = None
    reward_below: float | None = None
    error: str | None = None
    """Text in the error it ended with, or in the reason why it was parked or cancelled; upper and lower case are the
    same. Empty: any error."""
    task: str | None = None
    """Text anywhere in its task: id, environment, prompt, extras. Upper and lower case are the same."""

    @property
    def is_plain(self) -> bool:
        """Whether the number of matches follows from counts that exist anyway."""
        return all(one is None for one in (self.reward_min, self.reward_below, self.error, self.task))

    def has_task(self, group: BoardGroup) -> bool:
        if self.task is None:
            return True
        task, words = group.spec.task, self.task.lower()
        return any(words in text.lower() for text in _texts([task.id, task.environment, task.prompt, task.extras]))

    def fits(self, episode: BoardEpisode) -> bool:
        if self.state is not None and episode.state is not self.state:
            return False
        if self.reward_min is self.reward_below is self.error is None:
            return True
        result = None if episode.result is None else msgspec.json.decode(episode.result, type=EpisodeResult)
        return self._has_reward(result) and self._has_error(episode, result)

    def _has_reward(self, result: EpisodeResult | None) -> bool:
        if self.reward_min is self.reward_below is None:
            return True
        reward = None if result is None else result.total
        if reward is None:
            return False
        is_enough = self.reward_min is None or reward >= self.reward_min
        return is_enough and (self.reward_below is None or reward < self.reward_below)

    def _has_error(self, episode: BoardEpisode, result: EpisodeResult | None) -> bool:
        if self.error is None:
            return True
        error = None
        if result is not None and result.error is not None:
            error = f"{result.error.type}: {result.error.message}"
        elif episode.state in (EpisodeState.PARKED, EpisodeState.CANCELLED) and episode.losses:
            error = episode.losses[-1].reason
        return error is not None and self.error.lower() in error.lower()


class RunningSearch:
    """A search under way. Other calls may come between two steps; each episode is returned as it was when examined."""

    def __init__(self, groups: Sequence[BoardGroup], search: EpisodeSearch, *, limit: int | None, offset: int):
        self._search, self._from, self._to = search, offset, math.inf if limit is None else offset + limit
        # Copied, because a group lets go of its members if it is committed meanwhile.
        self._left = self._members([(group, group.members) for group in groups])
        self._read = 0
        """Number of characters read in this step."""
        self.found: list[EpisodeInfo] = []
        self.total = 0

    def step(self) -> bool:
        """Examines some more episodes. Returns False after the last ones."""
        self._read = 0
        for looked, member in enumerate(self._left, 1):
            if member is not None:
                self._look_at(member)
            if looked == PART or self._read >= PART_SIZE:
                return True
        return False

    def take(self) -> list[EpisodeInfo]:
        """Returns what was found since the last call."""
        taken, self.found = self.found, []
        return taken

    def _look_at(self, member: BoardEpisode) -> None:
        self._read += len(member.result or "")
        if not self._search.fits(member):
            return
        if self._from <= self.total < self._to:
            self.found.append(member.info())
        self.total += 1

    def _members(self, groups: Sequence[tuple[BoardGroup, list[BoardEpisode]]]) -> Iterator[BoardEpisode | None]:
        """Yields episodes; None for a group whose task does not match, because examining it takes time, too."""
        for group, members in groups:
            self._read += 0 if self._search.task is None else len(group.text)
            if self._search.has_task(group):
                yield from members
            else:
                yield None


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif value is not None:
        yield str(value)
