"""Judges how an environment behaves: failures, time, memory, whether the same goes the same way again."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from palestra.audit.episodes import ProbeEpisode, Trouble, shortened, text_of
from palestra.audit.evidence import Evidence, finding_of
from palestra.audit.findings import AuditFinding, FindingKind, Severity, finding

MIB = 1 << 20
STEP_MEMORY = 512 * MIB
GROWTH_EACH = 256 << 10  # bytes of an episode that stay: allocators keep less
GROWTH_ALL = 4 * MIB
FEWEST_IN_A_ROW = 6
"""Episodes in a row from which growing memory is seen; the first third warms up."""
SHOWN_CRASHES = 5


def judge_conduct(evidence: Evidence) -> list[AuditFinding]:
    return [*_failures(evidence), *_repeats(evidence), *_together(evidence), *_times(evidence), *_memory(evidence)]


def _failures(evidence: Evidence) -> Iterator[AuditFinding]:
    """A finding for each place where it fails: the error without its numbers and quotes."""
    hung = [one for one in evidence.all() if one.trouble is Trouble.HUNG]
    if hung:
        yield finding_of(FindingKind.HANG, Severity.ERROR, hung, f"{hung[0].error}.")
    by_place: dict[str, list[ProbeEpisode]] = {}
    for one in evidence.all():
        if one.trouble is Trouble.RAISED:
            by_place.setdefault(one.error.partition(": ")[0][:80], []).append(one)
    for episodes in list(by_place.values())[:SHOWN_CRASHES]:
        times = f" ({len(episodes)} episodes)" if len(episodes) > 1 else ""
        yield finding_of(FindingKind.CRASH, Severity.ERROR, episodes, f"{shortened(episodes[0].error)}{times}.")


def _repeats(evidence: Evidence) -> Iterator[AuditFinding]:
    changed = _changed(evidence, evidence.again)
    if changed:
        rewards = [pair for pair in changed if pair[0].reward != pair[1].reward]
        first, again = (rewards or changed)[0]
        severity = Severity.ERROR if rewards else Severity.WARNING
        seen = f"The same actions, played twice: {difference(first, again)}"
        yield finding_of(FindingKind.NONDETERMINISTIC, severity, [again, *(pair[1] for pair in changed)], seen)


def _together(evidence: Evidence) -> Iterator[AuditFinding]:
    """Finds what differs beside other episodes, but not when it is played again alone."""
    unsteady = {one.task for _, one in _changed(evidence, evidence.again)}
    changed = [pair for pair in _changed(evidence, evidence.together) if pair[0].task not in unsteady]
    if changed:
        first, again = changed[0]
        seen = f"Among {len(evidence.together)} episodes at once: {difference(first, again)}"
        yield finding_of(FindingKind.INTERFERENCE, Severity.ERROR, [again, *(pair[1] for pair in changed)], seen)


def _changed(evidence: Evidence, later: Sequence[ProbeEpisode]) -> list[tuple[ProbeEpisode, ProbeEpisode]]:
    pairs = [(evidence.first(one.task, one.probe), one) for one in later]
    return [(first, one) for first, one in pairs if first is not None and first.outcome != one.outcome]


def difference(first: ProbeEpisode, again: ProbeEpisode) -> str:
    """Says what differs first: a message, the end, or the reward."""
    for place, (one, other) in enumerate(zip(first.messages, again.messages, strict=False)):
        earlier, later = text_of(one), text_of(other)
        if earlier != later:
            start = max(0, next((i for i, (a, b) in enumerate(zip(earlier, later, strict=False)) if a != b), 0) - 20)
            return f"message {place} is {shortened(earlier[start:], 90)!r}, then {shortened(later[start:], 90)!r}."
    if first.trouble != again.trouble:
        return f"it ends with {first.error or 'no error'}, then with {again.error or 'no error'}."
    if len(first.messages) != len(again.messages):
        return f"it ends after {first.turns} turns, then after {again.turns}."
    return f"the reward is {first.reward}, then {again.reward}."


def _times(evidence: Evidence) -> Iterator[AuditFinding]:
    limit_s = evidence.settings.slow_s
    starts = [one.init_s for one in evidence.all()]
    for what, seconds in (("step", step_seconds(evidence)), ("start", starts)):
        if seconds and (median := statistics.median(seconds)) > limit_s:
            key = (lambda one: one.init_s) if what == "start" else (lambda one: max(one.step_s, default=0.0))
            slowest = max(evidence.all(), key=key)
            seen = f"The median {what} takes {median:.1f} s, the longest {max(seconds):.1f} s."
            yield finding_of(FindingKind.SLOW, Severity.WARNING, [slowest], seen)


def step_seconds(evidence: Evidence) -> list[float]:
    return [seconds for one in evidence.all() for seconds in one.step_s]


def _memory(evidence: Evidence) -> Iterator[AuditFinding]:
    largest = max(evidence.all(), key=lambda one: one.step_memory_bytes, default=None)
    if largest is not None and largest.step_memory_bytes > STEP_MEMORY:
        seen = f"A step makes the process {largest.step_memory_bytes / MIB:.0f} MiB larger."
        yield finding_of(FindingKind.MEMORY, Severity.WARNING, [largest], seen)
    each = growth(evidence)
    if each is not None and each > GROWTH_EACH and each * len(evidence.many) > GROWTH_ALL:
        seen = f"Each of {len(evidence.many)} closed episodes leaves {each / MIB:.1f} MiB behind."
        yield finding(FindingKind.MEMORY, Severity.ERROR, "many episodes in a row", "", seen)


def growth(evidence: Evidence) -> float | None:
    """Bytes that stay of an episode: the smaller of the growth of two later thirds, so that one jump does not count."""
    third = len(evidence.many) // 3
    if len(evidence.many) < FEWEST_IN_A_ROW:
        return None
    first, second, last = (evidence.many[place * third - 1] for place in (1, 2, 3))
    return min(second - first, last - second) / third
