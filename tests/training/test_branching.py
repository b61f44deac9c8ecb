"""Runs with forks: they learn from them, and a kill changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from palestra.runs.reader import Part, RunReader
from palestra.runs.record_files import read_records
from palestra.runs.saved_checkpoints import find_checkpoint
from palestra.view.rollouts.rollout_detail import read_rollout
from palestra.view.rollouts.rollout_list import RolloutQuery, list_rollouts
from palestra.view.runs.catalogue import Catalogue
from tests.training.test_same_bits import state_of
from tests.training.trainers import SMALL, finish, kill, merged, start, train, wait_for_steps

FORKED = {
    "environments": [{"name": "stockroom", "extras": {"max_turns": 3}}],
    "rollout": {"group_size": 2, "groups_per_step": 1, "branch": {"at": "each_turn", "width": 1, "budget": 60}},
    "data": {"zero_variance": "keep"},
    "steps": 2,
    "checkpoint": {"every": 1},
}


def write_config(folder: Path, **settings: Any) -> str:
    (folder / "run.json").write_text(json.dumps(merged(merged(SMALL, FORKED), settings)))
    return "run.json"


def played(run: RunReader) -> list[Any]:
    """What was sampled, with its advantages, and what came of it. Logprobs of a sampler differ in the last bits."""
    steps = run.steps(Part.TOKENS)
    records = [record for step in steps for record in read_records(run.step_file(Part.TOKENS, step))]
    rows = [[one["id"], one["advantages"], *(turn["tokens"] for turn in one["turns"])] for one in records]
    names = ("reward/mean", "loss/sum", "branch/forks", "branch/tokens", "optim/grad_norm")
    return [rows, [[row.get(name) for name in names] for row in run.read_metrics()]]


def test_a_killed_run_plays_the_same_forks_again(ephebe_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = write_config(tmp_path, server=ephebe_url)
    code, said = train(config, "--name", "whole")
    assert code == 0, said
    process = start(tmp_path, config, "--name", "cut")
    wait_for_steps(tmp_path, "cut", 1, process)
    kill(process)
    code, said = train("--resume", "cut")
    assert code == 0, said
    whole, cut = (RunReader(tmp_path / "runs" / name) for name in ("whole", "cut"))
    assert played(whole) == played(cut)
    rows = whole.read_metrics()
    assert sum(row["branch/forks"] for row in rows) > 0
    assert all(row["rollouts/total"] == 2 for row in rows)
    assert all(row["rollouts/sampled_tokens"] > row["branch/tokens"] for row in rows)
    show_forks(whole)


def show_forks(run: RunReader) -> None:
    """The pages show a fork beside the rollout that it was forked from, with its tokens."""
    catalogue = Catalogue(run.path.parent)
    listed = list_rollouts(catalogue, run.name, RolloutQuery(where="fork_turn>0"))
    (fork, *_) = [one for group in listed.groups for one in group.rollouts]
    detail = read_rollout(catalogue, run.name, Part.ROLLOUTS, fork["step"], fork["id"])
    assert detail.record["fork_of"] in [one.id for one in detail.siblings if not one.is_fork]
    assert detail.token_rows == [fork["id"]]
    group = next(one for one in list_rollouts(catalogue, run.name, RolloutQuery()).groups if len(one.rollouts) > 2)
    whole = [one["reward"] for one in group.rollouts if one.get("fork_of") is None]
    assert group.mean == sum(whole) / 2


@pytest.mark.slow
def test_killed_with_its_server_it_ends_at_the_same_bits(tmp_path):
    config = write_config(tmp_path, steps=4, rollout={"groups_per_step": 2})
    finish(start(tmp_path, config, "--name", "whole"))
    process = start(tmp_path, config, "--name", "cut", "checkpoint.every=3")
    wait_for_steps(tmp_path, "cut", 2, process)
    kill(process)
    finish(start(tmp_path, "--resume", "cut"))
    whole, cut = (RunReader(tmp_path / "runs" / name) for name in ("whole", "cut"))
    assert played(whole) == played(cut)
    ends = [find_checkpoint(run, "last").folder for run in (whole, cut)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert state_of(ends[0]) == state_of(ends[1])
