"""A defect of each kind is found where it was planted, and nothing is found where there is none."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from palestra.audit import AuditReport, AuditSettings, FindingKind, audit
from palestra.config.environment_entries import EnvironmentEntry
from tests.audit import planted

K = FindingKind
QUICK = AuditSettings(limit=4, at_once=6, fresh_process=False)


def audited(environment: type, settings: AuditSettings = QUICK) -> AuditReport:
    entry = EnvironmentEntry(name=f"{planted.__name__}:{environment.__name__}")
    return asyncio.run(audit(entry, settings))


def shown(report: AuditReport) -> list[str]:
    return [f"{one.kind}: {one.probe}: {one.seen}" for one in report.findings]


@pytest.mark.parametrize("environment", [planted.Sum, planted.SumWithoutGold, planted.Tries, planted.Box])
def test_nothing_is_found_in_a_sound_environment(environment: type) -> None:
    report = audited(environment)
    assert shown(report) == []
    assert not report.is_cut
    assert {one.probe: one.solved for one in report.probes}["gold"] == 4


@pytest.mark.parametrize(
    ("environment", "kinds"),
    [
        (planted.GoldFails, {K.GOLD_FAILS, K.NO_VARIANCE}),
        (planted.EmptyIsRight, {K.IDLE_PAYS}),
        (planted.IdleHalf, {K.IDLE_PAYS}),
        (planted.EndIsRight, {K.IDLE_PAYS}),
        (planted.ChanceIsRight, {K.RANDOM_PAYS, K.IDLE_PAYS}),
        (planted.ContainsIsRight, {K.CHEAT_PAYS}),
        (planted.MagicIsRight, {K.CHEAT_PAYS}),
        (planted.EchoIsRight, {K.CHEAT_PAYS}),
        (planted.LastNumberOfMany, {K.CHEAT_PAYS}),
        (planted.ObeysCalls, {K.CHEAT_PAYS}),
        (planted.SameAnswer, {K.CHEAT_PAYS}),
        (planted.NullIsRight, {K.CHEAT_PAYS}),
        (planted.Farming, {K.REWARD_RANGE}),
        (planted.Percent, {K.REWARD_RANGE}),
        (planted.NotANumber, {K.REWARD_RANGE}),
        (planted.Ungraded, {K.UNGRADED}),
        (planted.AlwaysRight, {K.NO_VARIANCE, K.IDLE_PAYS}),
        (planted.LeakInPrompt, {K.ANSWER_LEAK}),
        (planted.LeakInHint, {K.ANSWER_LEAK}),
        (planted.LeakUnlabelled, {K.ANSWER_LEAK}),
        (planted.Crashes, {K.CRASH}),
        (planted.CrashesAtStart, {K.CRASH}),
        (planted.Grows, {K.MEMORY}),
        (planted.RandomReward, {K.NONDETERMINISTIC}),
        (planted.RandomWords, {K.NONDETERMINISTIC}),
        (planted.SharedState, {K.INTERFERENCE}),
        (planted.Repeated, {K.DUPLICATE_TASKS}),
        (planted.Trained, {K.HELD_OUT_TRAINED}),
        (planted.Unstable, {K.UNSTABLE_TASKS}),
    ],
)
def test_a_planted_defect_is_found(environment: type, kinds: set[FindingKind]) -> None:
    report = audited(environment)
    found = {one.kind for one in report.findings}
    assert kinds <= found, shown(report)
    for one in report.findings:
        assert one.seen
        assert one.why
        assert one.advice
        assert one.probe
