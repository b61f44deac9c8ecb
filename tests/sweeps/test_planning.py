"""A plan has the whole config of every run."""

from __future__ import annotations

import pytest

from palestra.config import ConfigError
from palestra.runs.record_files import RunError
from palestra.sweeps.folder import SweepFolder, SweepNotFound, SweepReader, find_sweep
from palestra.sweeps.planning import load_member
from tests.sweeps.records import create, plan


def test_runs_differ_in_their_settings_names_and_aliases_alone(tmp_path):
    planned = plan(tmp_path, {"optimizer.lr": [1e-3, 3e-3], "seed": "0..4"}, set={"model.rank": 8})
    configs = [load_member(one) for one in planned.members]
    assert [one.name for one in planned.members][:2] == ["pop-0", "pop-1"]
    assert {(c.name, c.alias) for c in configs} == {(f"pop-{n}", f"pop-{n}") for n in range(10)}
    assert [(c.optimizer.lr, c.seed) for c in configs] == [(lr, seed) for lr in (1e-3, 3e-3) for seed in range(5)]
    same = {c.model_dump_json(exclude={"name", "alias", "seed", "optimizer"}) for c in configs}
    assert len(same) == 1
    assert configs[0].model.rank == 8


def test_a_run_without_an_alias_gets_none(tmp_path):
    assert plan(tmp_path, {"seed": "0..1"}, set={"alias": None}).members[0].config["alias"] is None


@pytest.mark.parametrize(
    ("vary", "settings", "said"),
    [
        ({"model.name": ["a", "b"]}, {}, "share a server"),
        ({"optimiser.lr": [1, 2]}, {}, "did you mean"),
        ({"seed": "0..1"}, {"prune": "halving", "set": {"eval.every": 0}}, "set eval.every"),
        ({"seed": "0..1"}, {"prune": "halving", "set": {"eval.every": 8}}, "before the last"),
        ({"steps": "4,8"}, {"prune": "halving"}, "cannot be varied"),
    ],
)
def test_a_plan_that_cannot_be_run_says_why(tmp_path, vary, settings, said):
    with pytest.raises(ConfigError, match=said):
        plan(tmp_path, vary, **settings)


@pytest.mark.parametrize(
    ("settings", "metric"),
    [({}, "eval/success"), ({"eval.every": 0}, "reward/mean"), ({"checkpoint.keep_best": None}, "reward/mean")],
)
def test_runs_are_compared_by_their_evaluations_if_they_have_any(tmp_path, settings, metric):
    assert plan(tmp_path, {"seed": "0..1"}, set=settings).metric == metric


def test_a_sweep_is_found_by_its_name_and_written_by_one_process(tmp_path):
    with create(tmp_path, {"seed": "0..1"}) as sweep:
        assert find_sweep("pop", tmp_path).plan == sweep.plan
        with pytest.raises(RunError, match="is being written by process"):
            SweepFolder.open(sweep.path)
        with pytest.raises(RunError):
            create(tmp_path, {"seed": "0..1"})
    assert not SweepReader(sweep.path).is_running
    with pytest.raises(RunError, match="already exists"):
        create(tmp_path, {"seed": "0..1"})
    with pytest.raises(SweepNotFound, match="did you mean pop"):
        find_sweep("popp", tmp_path)
