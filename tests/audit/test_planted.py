"""A defect of each kind is found where it was planted, and nothing is found where there is none."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from palestra.audit import AuditReport, AuditSettings, FindingKind, Severity, audit
from palestra.audit.platform_audit import judge_platform_task
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.platform import make_task
from palestra.environments.platform.changes import tables_of
from tests.audit import planted

K = FindingKind
QUICK = AuditSettings(limit=4, at_once=6, fresh_process=False, in_a_row=0)


def audited(environment: type, settings: AuditSettings = QUICK) -> AuditReport:
    entry = EnvironmentEntry(name=f"{planted.__name__}:{environment.__name__}")
    return asyncio.run(audit(entry, settings))


def shown(report: AuditReport) -> list[str]:
    return [f"{one.kind}: {one.probe}: {one.seen}" for one in report.findings]


@pytest.mark.parametrize("environment", [planted.Sum, planted.SumWithoutGold, planted.Tries, planted.Box])
def test_nothing_is_found_in_a_sound_environment(environment: type) -> None:
    report = audited(environment, replace(QUICK, in_a_row=24))
    assert shown(report) == []
    assert not report.is_cut
    assert {one.probe: one.solved for one in report.probes}["gold"] == 4


@pytest.mark.parametrize(
    ("environment", "kinds"),
    [
        (planted.GoldFails, {K.GOLD_FAILS, K.NO_VARIANCE}),
        (planted.EmptyIsRight, {K.IDLE_PAYS}),
        (planted.IdleHalf, {K.IDLE_PAYS}),
        (planted.EndIsRight, {K.IDLE_PAYS, K.NO_VARIANCE}),
        (planted.ChanceIsRight, {K.RANDOM_PAYS, K.CHEAT_PAYS}),
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
        (planted.RandomReward, {K.NONDETERMINISTIC, K.GOLD_FAILS}),
        (planted.RandomWords, {K.NONDETERMINISTIC}),
        (planted.SharedState, {K.INTERFERENCE}),
        (planted.Repeated, {K.DUPLICATE_TASKS}),
        (planted.Trained, {K.HELD_OUT_TRAINED}),
        (planted.Unstable, {K.UNSTABLE_TASKS}),
    ],
)
def test_a_planted_defect_is_found(environment: type, kinds: set[FindingKind]) -> None:
    report = audited(environment, replace(QUICK, in_a_row=24 if environment is planted.Grows else 0))
    assert {one.kind for one in report.findings} == kinds, shown(report)
    for one in report.findings:
        assert one.seen
        assert one.why
        assert one.advice
        assert one.probe


def test_a_call_that_hangs_is_found_and_the_audit_goes_on() -> None:
    try:
        report = audited(planted.Hangs, replace(QUICK, timeout_s=0.2))
    finally:
        planted.Hangs.released.set()
    (found,) = report.findings
    assert found.kind is K.HANG
    assert "took longer than 0.2 s" in found.seen
    assert {"gold", "malformed", "guess"} <= {one.probe for one in report.probes}


def test_slow_steps_are_a_warning() -> None:
    settings = replace(QUICK, slow_s=0.01, limit=1, at_once=1)
    (found,) = audited(planted.Slow, settings).findings
    assert (found.kind, found.severity) == (K.SLOW, Severity.WARNING)


def test_an_audit_ends_when_its_time_is_over_and_says_so() -> None:
    report = audited(planted.Slow, replace(QUICK, within_s=0.3))
    assert report.is_cut
    assert any("the time was over" in note for note in report.notes)
    assert report.seconds < 5


@pytest.mark.slow
def test_tasks_in_the_order_of_a_set_are_found_by_a_new_process() -> None:
    report = audited(planted.UnstableBetweenProcesses, replace(QUICK, fresh_process=True))
    assert {one.kind for one in report.findings} == {K.UNSTABLE_TASKS}, shown(report)
    assert "another process" in report.findings[0].seen
    assert shown(audited(planted.Sum, replace(QUICK, fresh_process=True))) == []


def test_ignored_kinds_are_counted_and_not_reported() -> None:
    report = audited(planted.Percent, replace(QUICK, ignored=frozenset({K.REWARD_RANGE})))
    assert (shown(report), report.ignored) == ([], 1)
    in_range = audited(planted.Percent, replace(QUICK, reward_range=(0.0, 100.0), success=100.0))
    assert shown(in_range) == []


def test_changes_beside_the_solution_are_found_where_a_verifier_does_not_see_them() -> None:
    task = make_task("keys-largest-2-0")
    assert judge_platform_task(task) == []
    unseen = {table.name: set(table.columns) for table in tables_of(task.seed.connection)}
    app = replace(task.app, volatile=unseen)
    blind = replace(task, app=app, seed=replace(task.seed, app=app))
    assert [one.kind for one in judge_platform_task(blind)] == [K.STRAY_CHANGE_PAYS]


def test_the_same_seed_plays_the_same() -> None:
    first, again = (audited(planted.Tries, replace(QUICK, seed=7)) for _ in range(2))
    assert first.probes == again.probes
    assert first.tasks == again.tasks == 4
