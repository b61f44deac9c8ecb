"""What a sweep has found: the best setting with its spread, what each key explains."""

from __future__ import annotations

import pytest

from palestra.runs.reader import RunStatus
from palestra.sweeps.findings import find, importances
from palestra.sweeps.folder import Decision, MemberState, MemberStatus
from tests.sweeps.records import create, play


def test_the_best_setting_is_that_with_the_best_mean_over_its_seeds(tmp_path):
    with create(tmp_path, {"optimizer.lr": [1e-3, 1e-2], "seed": "0..1"}) as sweep:
        for n, value in enumerate((0.9, 0.1, 0.6, 0.5)):
            play(sweep, n, {0: 0.0, 8: value}, RunStatus.DONE)
        found = find(sweep)
    assert found.best is not None
    assert (found.best.settings, found.best.members) == ({"optimizer.lr": 1e-2}, ["pop-2", "pop-3"])
    assert found.best.mean == pytest.approx(0.55)
    assert found.best.spread == pytest.approx(0.0707, abs=1e-4)
    assert found.statuses == {"done": 4}


def test_settings_that_failed_or_were_ended_early_come_after_those_that_went_on(tmp_path):
    with create(tmp_path, {"optimizer.lr": [1, 2, 3]}) as sweep:
        play(sweep, 0, {4: 0.9}, RunStatus.FAILED)
        sweep.decide([Decision(kind="pruned", member="pop-1", step=2, reason="2 of 2")])
        play(sweep, 1, {2: 0.8}, RunStatus.STOPPED)
        play(sweep, 2, {2: 0.1, 8: 0.3}, RunStatus.DONE)
        found = find(sweep)
    assert [one.members[0] for one in found.settings] == ["pop-2", "pop-1", "pop-0"]
    assert [one.status for one in found.members] == [MemberStatus.FAILED, MemberStatus.PRUNED, MemberStatus.DONE]
    assert found.members[0].error == "it went wrong"


def state(value: float, **settings: float) -> MemberState:
    return MemberState(
        name="x", settings=settings, status=MemberStatus.DONE, step=1, steps=1, values={1: value, 0: 0.0}
    )


def test_a_key_that_decides_everything_explains_everything_and_others_nothing():
    step, found = importances([state(float(a), a=a, b=b, seed=0) for a in (0, 1) for b in (0, 1, 2)])
    shares = {one.key: one.share for one in found}
    assert (step, found[0].key, shares["a"], shares["b"]) == (1, "a", pytest.approx(1.0), 0.0)
    assert shares["seed"] is None


def test_drawn_numbers_are_compared_by_thirds():
    _, found = importances([state(n / 10, lr=1.5**n) for n in range(12)])
    assert found[0].share == pytest.approx(0.87, abs=0.05)
    assert importances([]) == (None, [])
    assert importances([state(1.0, a=1), state(0.0, a=2)])[1][0].share is None
