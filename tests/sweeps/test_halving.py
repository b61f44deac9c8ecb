"""Successive halving: which runs end at a rung does not depend on which of them is faster."""

from __future__ import annotations

import random

import pytest

from palestra.runs.reader import RunStatus
from palestra.sweeps.folder import Decision, MemberStatus
from palestra.sweeps.halving import decide_rungs, rung_steps
from tests.sweeps.records import create, play

RATES = {"optimizer.lr": [1e-4, 1e-3, 1e-2, 1e-1]}


def kinds(decisions):
    return {one.member: one.kind for one in decisions}


def test_rungs_are_evaluated_steps_before_the_last(tmp_path):
    with create(tmp_path, RATES, prune="halving", halving={"first": 3}, set={"eval.every": 2, "steps": 20}) as sweep:
        assert rung_steps(sweep.config, sweep.plan.members[0].config) == [4, 6, 12]


def test_the_better_half_stays_and_a_rung_is_decided_once(tmp_path):
    with create(tmp_path, RATES, prune="halving", halving={"first": 2}) as sweep:
        for n, value in enumerate((0.1, 0.4, 0.3, 0.2)):
            assert decide_rungs(sweep) == []
            play(sweep, n, {0: 0.5, 2: value})
        found = decide_rungs(sweep)
        assert kinds(found) == {"pop-1": "kept", "pop-2": "kept", "pop-3": "pruned", "pop-0": "pruned"}
        assert "1 of 4 settings at step 2 by eval/success" in found[0].reason
        sweep.decide(found)
        assert decide_rungs(sweep) == []
        play(sweep, 1, {4: 0.5})
        play(sweep, 2, {3: 0.9, 4: 0.6}, RunStatus.DONE)
        assert kinds(decide_rungs(sweep)) == {"pop-2": "kept", "pop-1": "pruned"}


@pytest.mark.parametrize("order", range(3))
def test_seeds_of_a_setting_count_together_whatever_the_order(tmp_path, order):
    with create(tmp_path, {"optimizer.lr": [1e-3, 1e-2], "seed": "0..1"}, prune="halving") as sweep:
        values = [0.9, 0.1, 0.6, 0.5]
        members = list(range(4))
        random.Random(order).shuffle(members)
        for n in members:
            play(sweep, n, {1: values[n]})
        assert kinds(decide_rungs(sweep)) == dict(
            zip(("pop-2", "pop-3", "pop-0", "pop-1"), ("kept", "kept", "pruned", "pruned"), strict=True)
        )


def test_a_run_that_failed_counts_as_the_worst_and_holds_nobody_up(tmp_path):
    with create(tmp_path, {"optimizer.lr": [1e-3, 1e-2]}, prune="halving") as sweep:
        play(sweep, 1, {1: 0.1})
        play(sweep, 0, {0: 0.9}, RunStatus.FAILED)
        assert kinds(decide_rungs(sweep)) == {"pop-1": "kept", "pop-0": "pruned"}


def test_of_a_loss_less_is_better(tmp_path):
    with create(tmp_path, {"optimizer.lr": [1e-3, 1e-2]}, prune="halving", metric="eval/loss") as sweep:
        play(sweep, 0, {1: 2.0})
        play(sweep, 1, {1: 1.0})
        found = decide_rungs(sweep)
        assert (kinds(found), found[0].value) == ({"pop-1": "kept", "pop-0": "pruned"}, 1.0)


def test_a_paused_run_is_not_over(tmp_path):
    with create(tmp_path, {"seed": "0..1"}, prune="halving") as sweep:
        sweep.decide([Decision(kind="paused", member="pop-0", step=1, reason="others wait", attempt=1)])
        play(sweep, 0, {1: 0.5}, RunStatus.STOPPED)
        play(sweep, 1, {1: 0.5}, RunStatus.STOPPED)
        statuses = [state.status for state in sweep.states()]
        assert statuses == [MemberStatus.PAUSED, MemberStatus.STOPPED]
        assert [one.is_over for one in statuses] == [False, True]
        sweep.decide([Decision(kind="kept", member="pop-0", step=1, reason="1 of 1")])
        assert sweep.states()[0].status is MemberStatus.CUT  # decided, and not begun again
        play(sweep, 0, {2: 0.5}, RunStatus.STOPPED)
        assert sweep.states()[0].status is MemberStatus.STOPPED  # somebody has stopped it since
