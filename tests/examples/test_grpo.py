"""The GRPO loop in one file does what it says."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import sys
from argparse import Namespace
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "grpo.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_grpo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def rewards_of(script: ModuleType, capsys: pytest.CaptureFixture[str], server: str, **settings: Any) -> list[float]:
    given = {"model": "ephebe", "tokenizer": script.BUNDLED, "environment": "arithmetic", "lr": 2e-3, "seed": 0}
    asyncio.run(script.train(Namespace(server=server, key="tml-any", **given | {"max_tokens": 48} | settings)))
    return [float(found) for found in re.findall(r"reward ([\d.]+)", capsys.readouterr().out)]


@pytest.mark.parametrize("environment", ["arithmetic", pytest.param("stockroom", marks=pytest.mark.slow)])
def test_it_plays_and_trains(script, capsys, ephebe_url, environment):
    rewards = rewards_of(script, capsys, ephebe_url, environment=environment, steps=2, groups=2, group_size=3)
    assert len(rewards) == 2
    assert all(0 <= reward <= 1 for reward in rewards)


@pytest.mark.slow
def test_it_learns(script, capsys, ephebe_url):
    rewards = rewards_of(script, capsys, ephebe_url, steps=15, groups=16, group_size=8)
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.15


def test_what_was_only_read_is_not_learned(script):
    good, bad = (script.Rollout([1, 2, 3], [0.0, -1.0, -2.0], [False, True, True], reward) for reward in (1.0, 0.0))
    equal = [script.Rollout([1, 2], [0.0, -1.0], [False, True], 1.0)] * 2
    batch = script.batch_of([[good, bad], equal])
    assert [datum.loss_fn_inputs["advantages"].tolist() for datum in batch] == [
        pytest.approx([0.25, 0.25], rel=1e-4),
        pytest.approx([-0.25, -0.25], rel=1e-4),
    ]
    assert batch[0].loss_fn_inputs["target_tokens"].tolist() == [2, 3]
    assert batch[0].loss_fn_inputs["logprobs"].tolist() == [-1.0, -2.0]
