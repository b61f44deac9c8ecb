"""The same config and seed give the same weights to the bit, whatever the clock does to the batches of a sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from palestra.runs.reader import RunReader
from palestra.runs.saved_checkpoints import find_checkpoint
from tests.training.trainers import FEW, TOOLS, finish, kill, start, wait_for_steps

TURNS = {**TOOLS, "rollout": FEW, "steps": 2, "checkpoint": {"every": 2}}
"""Rollouts of several turns: their requests meet in other batches each time."""


def state_of(folder: Path) -> dict[str, bytes]:
    files = [load_file(folder / name) for name in ("adapter_model.safetensors", "optimizer.safetensors")]
    return {f"{n}/{name}": tensor.numpy().tobytes() for n, file in enumerate(files) for name, tensor in file.items()}


def figures(run: RunReader) -> list[list[Any]]:
    names = ("reward/mean", "optim/grad_norm", "loss/sum", "optim/kept", "guard/undone")
    return [[row.get(name) for name in names] for row in run.read_metrics()]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow, id="one"),
        pytest.param({"algorithm": {"minibatches": 2, "loss": "ppo"}}, id="minibatches"),
    ],
)
def test_two_runs_of_one_seed_take_the_same_steps(run_training, settings):
    once, again = (run_training(name, **TURNS, **settings) for name in ("once", "again"))
    assert figures(once) == figures(again)
    assert any(figures(once)[-1])


@pytest.mark.slow
def test_the_demo_ends_at_the_same_bits_twice_killed_once(tmp_path):
    settings = ["demo", "steps=6", "eval.every=0", "early_stop=null", "checkpoint.every=3"]
    finish(start(tmp_path, *settings, "--name", "whole"))
    process = start(tmp_path, *settings, "--name", "cut")
    wait_for_steps(tmp_path, "cut", 4, process)
    kill(process)
    finish(start(tmp_path, "--resume", "cut"))
    whole, cut = (RunReader(tmp_path / "runs" / name) for name in ("whole", "cut"))
    assert figures(whole) == figures(cut)
    ends = [find_checkpoint(run, "last").folder for run in (whole, cut)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert state_of(ends[0]) == state_of(ends[1])
