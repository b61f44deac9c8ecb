"""The result of an audit, for people and for programs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct, field

from palestra.audit.episodes import ProbeEpisode
from palestra.audit.evidence import Evidence
from palestra.audit.findings import AuditFinding, Severity
from palestra.audit.judges.conduct import growth, step_seconds
from palestra.audit.judges.rewards import flat_groups
from palestra.audit.policies import ProbeKind


class ProbeSummary(Struct, kw_only=True):
    probe: str
    episodes: int
    solved: int
    reward_mean: float | None
    reward_max: float | None
    failed: int


class AuditReport(Struct, kw_only=True):
    """The result of an audit of one environment."""

    target: str
    """The name that was audited."""
    tasks: int = 0
    """Number of tasks that were played."""
    seed: int = 0
    seconds: float = 0.0
    probes: list[ProbeSummary] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    """Times, memory and shares that are no findings."""
    notes: list[str] = field(default_factory=list)
    """What could not be played or judged, and why."""
    findings: list[AuditFinding] = field(default_factory=list)
    ignored: int = 0
    """Number of findings of kinds that are ignored or accepted."""
    accepted: dict[str, str] = field(default_factory=dict)
    """Kinds of findings that are meant here, each with the reason."""
    is_cut: bool = False
    """Whether the time was over before everything was played."""

    @property
    def errors(self) -> int:
        return sum(one.severity is Severity.ERROR for one in self.findings)

    def add(self, findings: Sequence[AuditFinding], ignored: frozenset[str]) -> None:
        """Adds findings, errors first; those of ignored and accepted kinds are only counted."""
        kept = [one for one in findings if one.kind not in ignored]
        self.ignored += len(findings) - len(kept)
        self.findings = sorted([*self.findings, *kept], key=lambda one: one.severity is not Severity.ERROR)


def probe_summaries(evidence: Evidence) -> list[ProbeSummary]:
    """Returns a line for each kind of probe that was played."""
    found = [_summary(kind, episodes, evidence) for kind, episodes in evidence.episodes.items() if episodes]
    return sorted(found, key=lambda one: list(ProbeKind).index(ProbeKind(one.probe)))


def _summary(kind: ProbeKind, episodes: Sequence[ProbeEpisode], evidence: Evidence) -> ProbeSummary:
    rewards = [one.reward for one in episodes if one.reward is not None]
    return ProbeSummary(
        probe=kind,
        episodes=len(episodes),
        solved=sum(map(evidence.is_solved, episodes)),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        reward_max=max(rewards, default=None),
        failed=sum(one.trouble is not None for one in episodes),
    )


def figures(evidence: Evidence) -> dict[str, float]:
    """Returns what was measured."""
    steps = step_seconds(evidence)
    starts = [one.init_s for one in evidence.all() if one.init_s]
    found = {"reward_low": evidence.low, "reward_high": evidence.high}
    if steps:
        found |= {"step_s_median": statistics.median(steps), "step_s_max": max(steps)}
    if starts:
        found |= {"start_s_median": statistics.median(starts), "start_s_max": max(starts)}
    if (each := growth(evidence)) is not None:
        found["memory_growth_bytes"] = max(0.0, each)
        found["step_memory_bytes"] = max((one.step_memory_bytes for one in evidence.all()), default=0)
    share, _ = flat_groups(evidence)
    if share is not None:
        found["zero_variance_share"] = share
    return found
