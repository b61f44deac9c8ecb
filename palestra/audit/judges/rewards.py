"""Judges rewards: gold should get one, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from palestra.audit.episodes import ProbeEpisode, Trouble
from palestra.audit.evidence import Evidence, finding_of
from palestra.audit.findings import AuditFinding, FindingKind, Severity
from palestra.audit.policies import ProbeKind

IDLE_SHARE = 0.1  # of the range: a reward for doing nothing below this is no reason to do it
LUCKY_SHARE = 0.25  # of its episodes that chance may solve: a call without arguments is hit on
GUESSED_SHARE = 0.75  # of the tasks that one answer may solve: more than a coin does
FEW_GUESSES = 4  # tasks below which a share of guesses says nothing
FLAT_SHARE = 0.25  # of simulated groups without variance; of a fair task at skill 0.5 it is 1 in 128
ROUNDING = 1e-6
SIMULATED = 64  # groups of each task


def judge_rewards(evidence: Evidence) -> list[AuditFinding]:
    return [
        *_gold(evidence),
        *_idle(evidence),
        *_lucky(evidence),
        *_cheats(evidence),
        *_guesses(evidence),
        *_range(evidence),
        *_ungraded(evidence),
        *_variance(evidence),
    ]


def _gold(evidence: Evidence) -> Iterator[AuditFinding]:
    """Gold is judged only where the environment names it: a known answer may be asked for in another form."""
    failed = [one for one in evidence.all(ProbeKind.GOLD) if not evidence.is_solved(one) and not one.trouble]
    if failed and evidence.has_gold:
        seen = f"The solution gets reward {_number(failed[0].reward)}, not {evidence.settings.success:g}."
        yield finding_of(FindingKind.GOLD_FAILS, Severity.ERROR, failed, seen)


def _idle(evidence: Evidence) -> Iterator[AuditFinding]:
    paid = [
        one
        for one in evidence.all(ProbeKind.NOTHING)
        if one.reward is not None and one.reward > 0 and evidence.share(one.reward) >= IDLE_SHARE
    ]
    if paid:
        most = max(paid, key=lambda one: one.reward or 0.0)
        severity = Severity.ERROR if any(map(evidence.is_solved, paid)) else Severity.WARNING
        seen = f"Played as {most.probe!r}, the task gets reward {_number(most.reward)}."
        yield finding_of(FindingKind.IDLE_PAYS, severity, [most, *paid], seen)


def _paid_for_more(evidence: Evidence, *kinds: ProbeKind) -> list[ProbeEpisode]:
    """Episodes of tasks that doing nothing does not solve: where it does, everything else pays, too."""
    idle = {one.task for one in evidence.all(ProbeKind.NOTHING) if evidence.is_solved(one)}
    return [one for one in evidence.all(*kinds) if one.task not in idle]


def _lucky(evidence: Evidence) -> Iterator[AuditFinding]:
    played = _paid_for_more(evidence, ProbeKind.RANDOM, ProbeKind.REPEATED)
    solved = [one for one in played if evidence.is_solved(one)]
    if solved and len(solved) > LUCKY_SHARE * len(played):
        seen = f"Chance ({solved[0].probe}) solves the task in {len(solved)} of {len(played)} episodes."
        yield finding_of(FindingKind.RANDOM_PAYS, Severity.ERROR, solved, seen)


def _cheats(evidence: Evidence) -> Iterator[AuditFinding]:
    """Each that pays is a finding of its own; of malformed messages the first is."""
    by_probe: dict[str, list[ProbeEpisode]] = {}
    for one in _paid_for_more(evidence, ProbeKind.CHEAT, ProbeKind.HEDGE, ProbeKind.MALFORMED):
        if evidence.is_solved(one):
            by_probe.setdefault(one.probe.partition(":")[0], []).append(one)
    for episodes in by_probe.values():
        seen = f"Played as {episodes[0].probe!r}, the task gets reward {_number(episodes[0].reward)}."
        yield finding_of(FindingKind.CHEAT_PAYS, Severity.ERROR, episodes, seen)


def _guesses(evidence: Evidence) -> Iterator[AuditFinding]:
    by_probe: dict[str, list[ProbeEpisode]] = {}
    for one in _paid_for_more(evidence, ProbeKind.GUESS):
        by_probe.setdefault(one.probe, []).append(one)
    best = max(by_probe.values(), key=lambda played: sum(map(evidence.is_solved, played)), default=[])
    solved = [one for one in best if evidence.is_solved(one)]
    if len(best) >= FEW_GUESSES and len(solved) > GUESSED_SHARE * len(best):
        seen = f"A policy that {best[0].probe} solves {len(solved)} of {len(best)} tasks."
        yield finding_of(FindingKind.CHEAT_PAYS, Severity.ERROR, solved, seen)


def _range(evidence: Evidence) -> Iterator[AuditFinding]:
    low, high = evidence.low - ROUNDING, evidence.high + ROUNDING
    bad = [one for one in evidence.all() if one.trouble is Trouble.BAD_REWARD]
    out = [one for one in evidence.all() if one.reward is not None and not low <= one.reward <= high]
    if bad:
        yield finding_of(FindingKind.REWARD_RANGE, Severity.ERROR, bad, f"{bad[0].error}.")
    if out:
        worst = max(out, key=lambda one: abs(one.reward or 0.0))
        seen = f"An episode gets reward {_number(worst.reward)}, outside {evidence.low:g} to {evidence.high:g}."
        yield finding_of(FindingKind.REWARD_RANGE, Severity.ERROR, [worst, *out], seen)


def _ungraded(evidence: Evidence) -> Iterator[AuditFinding]:
    ended = [one for one in evidence.all() if not one.trouble and one.messages]
    unknown = [one for one in ended if one.reward is None]
    if unknown:
        seen = f"{len(unknown)} of {len(ended)} episodes have no reward."
        reason = str(unknown[0].verdict.get("error") or "")
        seen += f" The verifier says: {reason[:200]}" if reason else ""
        yield finding_of(FindingKind.UNGRADED, Severity.WARNING, unknown, seen)


def _variance(evidence: Evidence) -> Iterator[AuditFinding]:
    """Simulates groups in which each rollout solves the task with the given skill, else does something else that was
    played."""
    share, flat = flat_groups(evidence)
    if share is not None and share > FLAT_SHARE:
        settings = evidence.settings
        seen = (
            f"{share:.0%} of groups of {settings.group_size} at skill {settings.skill:g} have no variance: "
            f"a solution is worth as much as anything else."
        )
        yield finding_of(FindingKind.NO_VARIANCE, Severity.ERROR, flat, seen)


def flat_groups(evidence: Evidence) -> tuple[float | None, list[ProbeEpisode]]:
    """Returns the share of simulated groups without variance, and gold's episodes of tasks in which most are; None if
    no task has both a solution and something else."""
    settings = evidence.settings
    shares: list[float] = []
    flat: list[ProbeEpisode] = []
    for gold in evidence.all(ProbeKind.GOLD):
        others = _other_rewards(evidence, gold.task)
        has_failed = evidence.has_gold and not evidence.is_solved(gold)  # which is a finding of its own
        if gold.reward is None or not others or has_failed:
            continue
        rng = random.Random(f"{settings.seed}/{gold.task}/groups")
        same = 0
        for _ in range(SIMULATED):
            drawn = [
                gold.reward if rng.random() < settings.skill else rng.choice(others) for _ in range(settings.group_size)
            ]
            same += max(drawn) - min(drawn) < ROUNDING
        shares.append(same / SIMULATED)
        flat += [gold] if shares[-1] > FLAT_SHARE else []
    return (sum(shares) / len(shares) if shares else None), flat


def _other_rewards(evidence: Evidence, task: str) -> Sequence[float]:
    kinds = (ProbeKind.NOTHING, ProbeKind.RANDOM, ProbeKind.REPEATED)
    return [one.reward for one in evidence.all(*kinds) if one.task == task and one.reward is not None]


def _number(reward: float | None) -> str:
    return "none" if reward is None else f"{reward:g}"
