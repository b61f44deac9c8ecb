"""All that an audit has seen of an environment, as the judges read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field

from palestra.audit.episodes import ProbeEpisode
from palestra.audit.findings import AuditFinding, FindingKind, Severity, finding
from palestra.audit.policies import ProbeKind
from palestra.audit.settings import AuditSettings
from palestra.types.rollouts import Task


class Evidence(Struct, kw_only=True):
    settings: AuditSettings
    tasks: Sequence[Task]
    """The tasks that were played."""
    low: float
    high: float
    """Smallest and largest reward."""
    answers: Mapping[str, Sequence[str]]
    """Known answers by task."""
    has_gold: bool = False
    """Whether the environment itself says how its tasks are solved."""
    episodes: dict[ProbeKind, list[ProbeEpisode]] = field(default_factory=dict)
    """Each played once, alone."""
    again: list[ProbeEpisode] = field(default_factory=list)
    """Some of them, played a second time."""
    together: list[ProbeEpisode] = field(default_factory=list)
    """Some of them, played at the same time as others."""
    many: list[int] = field(default_factory=list)
    """Bytes of memory of this process, after each of many episodes in a row; empty where it is not known."""

    def all(self, *kinds: ProbeKind) -> Iterator[ProbeEpisode]:
        for kind in kinds or ProbeKind:
            yield from self.episodes.get(kind, [])

    def first(self, task: str, probe: str) -> ProbeEpisode | None:
        """The episode of this task and probe that was played alone."""
        return next((one for one in self.all() if (one.task, one.probe) == (task, probe)), None)

    def is_solved(self, episode: ProbeEpisode) -> bool:
        """Whether it has the reward of a solved task: a success, or the whole range where that ends earlier."""
        return episode.reward is not None and episode.reward >= min(self.settings.success, self.high)

    def share(self, reward: float) -> float:
        """The place of a reward in the range, from 0 to 1."""
        return (reward - self.low) / ((self.high - self.low) or 1.0)


def finding_of(kind: FindingKind, severity: Severity, episodes: Sequence[ProbeEpisode], seen: str) -> AuditFinding:
    """Makes a finding about episodes, shown by the first of them."""
    first = episodes[0]
    tasks = len({one.task for one in episodes})
    return finding(kind, severity, first.probe, first.task, seen, tasks=tasks, transcript=first.transcript)
