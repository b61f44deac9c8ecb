"""A defect of each kind is found where it was planted, and nothing is found where there is none."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from msgspec.structs import replace

from palestra.audit import AuditReport, AuditSettings, FindingKind, Severity, audit
from palestra.audit.platform_audit import judge_platform_task
from palestra.config.environment_entries import EnvironmentEntry
from palestra.environments.platform import DeletedRow, Expected, InsertedRow, Instance, UpdatedRow, make_task
from palestra.environments.platform.attackers import stray_write
from palestra.environments.platform.changes import Change, ChangeKind
from palestra.environments.platform.golden import play_golden
from tests.audit import planted

K = FindingKind
slow = partial(pytest.param, marks=pytest.mark.slow)
QUICK = AuditSettings(limit=2, at_once=6, fresh_process=False, in_a_row=0, slow_s=60)


SEEN_IN_FOUR = (planted.SameAnswer, planted.LeakUnlabelled)
"""Defects that two tasks do not show."""


def audited(environment: type, settings: AuditSettings = QUICK) -> AuditReport:
    entry = EnvironmentEntry(name=f"{planted.__name__}:{environment.__name__}")
    return asyncio.run(audit(entry, settings))


def shown(report: AuditReport) -> list[str]:
    return [f"{one.kind}: {one.probe}: {one.seen}" for one in report.findings]


@pytest.mark.parametrize(
    "environment", [slow(planted.Sum), planted.SumWithoutGold, slow(planted.SumWithVerdict), planted.Tries, planted.Box]
)
def test_nothing_is_found_in_a_sound_environment(environment: type) -> None:
    report = audited(environment, replace(QUICK, in_a_row=24))
    assert shown(report) == []
    assert not report.is_cut
    assert {one.probe: one.solved for one in report.probes}["gold"] == 2


@pytest.mark.parametrize(
    ("environment", "kinds"),
    [
        (planted.GoldFails, {K.GOLD_FAILS}),
        slow(planted.EmptyIsRight, {K.IDLE_PAYS}),
        (planted.IdleHalf, {K.IDLE_PAYS}),
        slow(planted.EndIsRight, {K.IDLE_PAYS, K.NO_VARIANCE}),
        slow(planted.ChanceIsRight, {K.RANDOM_PAYS, K.CHEAT_PAYS}),
        (planted.ContainsIsRight, {K.CHEAT_PAYS}),
        (planted.MagicIsRight, {K.CHEAT_PAYS}),
        (planted.Calculates, {K.EXECUTES_ANSWER}),
        slow(planted.EchoIsRight, {K.CHEAT_PAYS}),
        slow(planted.LastNumberOfMany, {K.CHEAT_PAYS}),
        (planted.ObeysCalls, {K.CHEAT_PAYS}),
        (planted.SameAnswer, {K.CHEAT_PAYS}),
        slow(planted.NullIsRight, {K.CHEAT_PAYS}),
        slow(planted.Farming, {K.REWARD_RANGE}),
        (planted.Percent, {K.REWARD_RANGE}),
        slow(planted.NotANumber, {K.REWARD_RANGE}),
        (planted.Ungraded, {K.UNGRADED}),
        (planted.AlwaysRight, {K.NO_VARIANCE, K.IDLE_PAYS}),
        (planted.LeakInPrompt, {K.ANSWER_LEAK}),
        (planted.LeakInHint, {K.ANSWER_LEAK}),
        slow(planted.LeakUnlabelled, {K.ANSWER_LEAK}),
        (planted.Crashes, {K.CRASH}),
        slow(planted.CrashesAtStart, {K.CRASH}),
        (planted.Grows, {K.MEMORY}),
        (planted.RandomReward, {K.NONDETERMINISTIC, K.GOLD_FAILS}),
        slow(planted.RandomWords, {K.NONDETERMINISTIC}),
        (planted.SharedState, {K.INTERFERENCE}),
        (planted.Repeated, {K.DUPLICATE_TASKS}),
        slow(planted.Trained, {K.HELD_OUT_TRAINED}),
        (planted.Unstable, {K.UNSTABLE_TASKS}),
    ],
)
def test_a_planted_defect_is_found(environment: type, kinds: set[FindingKind]) -> None:
    rows = 24 if environment is planted.Grows else 0
    report = audited(environment, replace(QUICK, limit=4 if environment in SEEN_IN_FOUR else 2, in_a_row=rows))
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


def test_a_listing_of_tasks_that_does_not_end_is_found() -> None:
    try:
        (found,) = audited(planted.EndlessTasks, replace(QUICK, within_s=0.4)).findings
    finally:
        planted.EndlessTasks.released.set()
    assert (found.kind, found.probe) == (K.HANG, "lists the tasks")


def test_slow_steps_are_a_warning() -> None:
    settings = replace(QUICK, slow_s=0.01, limit=1, at_once=1, within_s=1.0)
    (found,) = audited(planted.Slow, settings).findings  # of what is played in a second
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


def test_a_change_beside_the_solution_is_found_where_the_verifier_accepts_it() -> None:
    task = make_task("keys-put_number-0b-1")
    assert judge_platform_task(task) == []
    instance = Instance(task.seed)
    play_golden(task, instance)
    stray_write(task, instance)
    changes = instance.changes()
    template = replace(task.template, expect=lambda *_: [expected(one) for one in changes])
    found = judge_platform_task(replace(task, template=template))
    assert [one.kind for one in found] == [K.STRAY_CHANGE_PAYS]


def expected(change: Change) -> Expected:
    match change.kind:
        case ChangeKind.INSERT:
            return InsertedRow(change.table, change.after)
        case ChangeKind.UPDATE:
            return UpdatedRow(change.table, change.key, {name: change.after[name] for name in change.fields})
        case ChangeKind.DELETE:
            return DeletedRow(change.table, change.key)


def test_the_same_seed_plays_the_same() -> None:
    first, again = (audited(planted.Tries, replace(QUICK, seed=7)) for _ in range(2))
    assert first.probes == again.probes
    assert first.tasks == again.tasks == 2
